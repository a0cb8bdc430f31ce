// Backward in bfloat16, on the tiles of AMX. Keys lie on the lanes, as in backward.h. Included inside the namespace of
// its level.
//
// Weights and the gradients of scores are rounded to bfloat16, so that what the keys share is taken off before, as there.
// Nothing is taken off values: products of bfloat16 are exact, and their sum and delta are float32.

// The queries of one batch row and key/value head: (group, padded t) in tiles of tokens and, transposed, of numbers.
struct TileQueries {
  int64_t padded, h, v, rows;
  Array<uint16_t> query, query_columns, cotangent, cotangent_columns;
  Array<float> top, share, delta;  // share: 1 / total

  explicit TileQueries(const Attention& x)
      : padded(round_up(x.t, TERMS)),
        h(round_up(x.h, TERMS)),
        v(round_up(x.v, TERMS)),
        rows(x.group() * padded),
        query(rows * h),
        query_columns(rows * h),
        cotangent(rows * v),
        cotangent_columns(rows * v),
        top(rows),
        share(rows),
        delta(rows) {}

  // Copies TERMS queries from token `first` of query head n on, which are rows `at` and those after it.
  template <typename O>
  void copy(const Backward& x, int64_t b, int64_t n, int64_t first, int64_t at, bool write_delta) {
    const Layout queries = tokens_first(x.t, x.n, x.h), outputs = tokens_first(x.t, x.n, x.v);
    const BFloat16 *from_query[TERMS] = {}, *from_cotangent[TERMS] = {};
    const O* output[TERMS] = {};
    const int64_t count = std::min(TERMS, x.t - first), row = (b * x.n + n) * x.t + first;
    std::fill_n(top + at, TERMS, 0.0f);
    std::fill_n(share + at, TERMS, 0.0f);
    for (int64_t i = 0; i < count; ++i) {
      const BFloat16* one = static_cast<const BFloat16*>(x.query) + queries.offset(b, first + i, n);
      if (finite(one, x.h, query_factor(x))) from_query[i] = one;
      const int64_t place = outputs.offset(b, first + i, n);
      const BFloat16* cotangent = static_cast<const BFloat16*>(x.cotangent) + place;
      const bool ok = finite(cotangent, x.v);
      if (ok) from_cotangent[i] = cotangent;
      output[i] = static_cast<const O*>(x.output) + place;
      const float total = x.total[row + i];
      top[at + i] = x.top[row + i];
      share[at + i] = !ok ? NAN : total == 0 ? 0 : 1 / total;
    }
    put_rows(from_query, x.h, query + at * h);
    put_columns(from_query, x.h, query_columns + at * round_up(x.h, SIDE));
    put_rows(from_cotangent, x.v, cotangent + at * v);
    put_columns(from_cotangent, x.v, cotangent_columns + at * round_up(x.v, SIDE));
    Array<float> columns(x.v * WIDTH), none(x.v);
    std::fill_n(static_cast<float*>(none), x.v, 0.0f);
    for (int64_t i = 0; i < TERMS; i += WIDTH)
      store(delta + at + i, deltas(from_cotangent + i, output + i, x.v, none, columns).whole);
    for (int64_t i = 0; i < count; ++i) {
      if (!from_cotangent[i]) delta[at + i] = NAN;
      if (write_delta) x.delta[row + i] = delta[at + i];
    }
  }
};

// The numbers of a call in bfloat16.
struct BackwardTiles {
  using Type = BFloat16;
  using Registers = TileRegisters;
  static constexpr int64_t STEP = TERMS;  // queries at a time
  static_assert(LANES == TERMS && WIDTH == SIDE);

  const Backward& x;
  int64_t b, h, v;  // widths rounded up to whole tiles of columns
  TileQueries queries;
  KeyPanel panel{};  // key and value as pairs of numbers, (h / 2, LANES); key_rows as pairs of keys, (h / SIDE, SIDE, SIDE)
  float *common, *scores, *gradients, *weight_pairs, *gradient_pairs, *gradient_rows;

  static int64_t scratch_size(const Attention& x) {
    const int64_t h = round_up(x.h, TERMS), v = round_up(x.v, TERMS);
    return h + LANES * (2 * h + 2 * v) + QUERIES * LANES * 7 / 2;
  }

  BackwardTiles(const Backward& x, int64_t b, int64_t kv, float* scratch)
      : x(x), b(b), h(round_up(x.h, SIDE)), v(round_up(x.v, SIDE)), queries(x) {
    const auto take = [&](int64_t size) { return std::exchange(scratch, scratch + size); };
    panel.kv = kv;
    common = take(round_up(x.h, TERMS));
    panel.key = take(round_up(x.h, TERMS) / 2 * LANES);
    panel.key_rows = take(h * SIDE);
    panel.value = take(round_up(x.v, TERMS) / 2 * LANES);
    panel.d_key = take(h * LANES);
    panel.d_value = take(v * LANES);
    scores = take(QUERIES * LANES);
    gradients = take(QUERIES * LANES);
    weight_pairs = take(QUERIES / 2 * LANES);
    gradient_pairs = take(QUERIES / 2 * LANES);
    gradient_rows = take(QUERIES * LANES / 2);
  }

  void begin_keys() {
    const Layout key = keys_layout(x, x.h), value = keys_layout(x, x.v);
    const BFloat16 *keys[LANES] = {}, *values[LANES] = {};
    for (int64_t lane = 0; lane < LANES; ++lane) {
      const int64_t j = std::min(panel.first + lane, x.s - 1);  // lanes beyond the last key repeat it, hidden
      const BFloat16* one_key = static_cast<const BFloat16*>(x.key) + key.offset(b, j, panel.kv);
      const BFloat16* one_value = static_cast<const BFloat16*>(x.value) + value.offset(b, j, panel.kv);
      panel.key_ok[lane] = finite(one_key, x.h);
      panel.value_ok[lane] = finite(one_value, x.v);
      if (panel.key_ok[lane]) keys[lane] = one_key;
      if (panel.value_ok[lane]) values[lane] = one_value;
      panel.index[lane / WIDTH][lane % WIDTH] = static_cast<int32_t>(panel.first + lane);
      if (x.key_segment) panel.segment[lane / WIDTH][lane % WIDTH] = x.key_segment[b * x.s + j];
    }
    for (int64_t half = 0; half < LANES; half += WIDTH) {
      for_pair_columns(keys + half, x.h, round_up(x.h, TERMS) / 2,
                       [&](int64_t c, Ints lanes) { store(panel.key + c * LANES + half, (Vector)lanes); });
      for_pair_columns(values + half, x.v, round_up(x.v, TERMS) / 2,
                       [&](int64_t c, Ints lanes) { store(panel.value + c * LANES + half, (Vector)lanes); });
    }
    for (int64_t c = 0; c < h; c += SIDE)
      for (int64_t i = 0; i < SIDE; ++i) {
        const Vector first = load_or_zero(keys[2 * i], c, x.h) - load(common + c);
        const Vector second = load_or_zero(keys[2 * i + 1], c, x.h) - load(common + c);
        store(panel.key_rows + (c + i) * SIDE, (Vector)pairs_of(first, second));
      }
    std::fill_n(panel.d_key, h * LANES, 0.0f);
    std::fill_n(panel.d_value, v * LANES, 0.0f);
  }

  // Turns scores and do v^T of queries [first, first + count) of one head, rows from `at` on, into weights and gradients of scores.
  void weigh(int64_t head, int64_t at, int64_t first, int64_t count, bool masked) {
    const int64_t n = panel.kv * x.group() + head;
    float factor = query_factor(x);
    const bool capped = x.soft_cap > 0;
    if (capped) {
      for (int64_t i = 0; i < count * LANES; i += WIDTH) store(scores + i, load(scores + i) * factor);
      cap_scores(scores, count * LANES, x.soft_cap);
      factor = 1;
    }
    for (int64_t i = 0; i < count; i += 2) {
      Vector weight[2][2], gradient[2][2];
      for (int64_t row = 0; row < 2; ++row)
        for (int half = 0; half < 2; ++half) {
          const int64_t lane = (i + row) * LANES + half * WIDTH;
          const Vector score = load(scores + lane);
          Vector p = exp2(score * factor - queries.top[at + i + row]) * queries.share[at + i + row];
          if (masked) p = visible_keys(x, b, n, first + i + row, half, panel) ? p : Vector{};
          Vector dx = p * (load(gradients + lane) - queries.delta[at + i + row]);
          const Vector tanh = score / (x.soft_cap * LOG2_E);
          if (capped) dx *= 1 - tanh * tanh;
          weight[row][half] = p;
          gradient[row][half] = p == 0 ? Vector{} : dx;  // hidden, beside numbers that may have overflowed
        }
      for (int half = 0; half < 2; ++half) {
        const int64_t lane = i / 2 * LANES + half * WIDTH;
        store(weight_pairs + lane, (Vector)pairs_of(weight[0][half], weight[1][half]));
        store(gradient_pairs + lane, (Vector)pairs_of(gradient[0][half], gradient[1][half]));
      }
      for (int64_t row = 0; row < 2; ++row)
        store(gradient_rows + (i + row) * SIDE, (Vector)_mm512_cvtne2ps_pbh(gradient[row][1], gradient[row][0]));
    }
  }

  // d_query (count, h) += gradients . keys
  void add_query_gradients(int64_t count, float* d_query) const {
    for (int64_t c = 0; c < h; c += SIDE) {
      _tile_loadd(6, panel.key_rows + c * SIDE, 64);
      for (int64_t i = 0; i < count; i += 2 * SIDE) {
        float* to = d_query + i * h + c;
        _tile_loadd(0, to, h * sizeof(float));
        _tile_loadd(1, to + SIDE * h, h * sizeof(float));
        _tile_loadd(4, gradient_rows + i * SIDE, 64);
        _tile_loadd(5, gradient_rows + (i + SIDE) * SIDE, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 5, 6);
        _tile_stored(0, to, h * sizeof(float));
        _tile_stored(1, to + SIDE * h, h * sizeof(float));
      }
    }
  }

  // Queries [first, first + count) of one head against the panel.
  void attend(int64_t head, int64_t first, int64_t count, bool masked, float* d_query) {
    const int64_t at = head * queries.padded + first;
    score_tiles(queries.query + at * queries.h, panel.key, queries.h / TERMS, count, scores);
    score_tiles(queries.cotangent + at * queries.v, panel.value, queries.v / TERMS, count, gradients);
    weigh(head, at, first, count, masked);
    add_value_tiles(queries.cotangent_columns + at * v, weight_pairs, v / SIDE, count, panel.d_value);
    add_value_tiles(queries.query_columns + at * h, gradient_pairs, h / SIDE, count, panel.d_key);
    add_query_gradients(count, d_query + at * h);
  }

  static void run(const Backward& x, int64_t b, int64_t kv, int64_t part, int64_t parts, const Range* ranges,
                  float* scratch, float* d_query) {
    BackwardTiles tiles(x, b, kv, scratch);
    std::fill_n(tiles.common, round_up(x.h, TERMS), 0.0f);
    const Layout key = keys_layout(x, x.h);
    Array<uint8_t> seen(x.s);
    find_seen(x, b, kv, seen);
    // With sinks or a soft cap the gradients of the scores do not add up to 0.
    if (!x.sinks && x.soft_cap == 0)
      find_common(static_cast<const BFloat16*>(x.key) + key.offset(b, 0, kv), key, seen, x.s, x.h, tiles.common);
    for (int64_t head = 0; head < x.group(); ++head)
      for (int64_t first = 0; first < tiles.queries.padded; first += TERMS) {
        const int64_t n = kv * x.group() + head, at = head * tiles.queries.padded + first;
        if (x.wide)
          tiles.queries.copy<float>(x, b, n, first, at, part == 0);
        else
          tiles.queries.copy<BFloat16>(x, b, n, first, at, part == 0);
      }
    std::fill_n(d_query, tiles.queries.rows * tiles.h, 0.0f);
    for (tiles.panel.first = part * LANES; tiles.panel.first < x.s; tiles.panel.first += parts * LANES) {
      tiles.begin_keys();
      for_queries<STEP>(x, b, ranges, tiles.panel, [&](int64_t first, int64_t count, bool masked) {
        for (int64_t head = 0; head < x.group(); ++head) tiles.attend(head, first, count, masked, d_query);
      });
      finish_keys<BFloat16>(x, b, kv, tiles.panel, x.scale);
    }
  }
};
