// Backward. Keys lie on the lanes of vectors, so that the gradients of a panel of keys and values stay in the cache while
// all queries that see them pass. Included once for each instruction level, inside its namespace.
//
//     p = exp2(x - top) / total;  dv = p^T do;  dx = p (do v^T - delta);  dk = dx^T q;  dq = dx k
//
// What all values of a head share cancels in do v^T - delta, and what its keys share cancels in dq, where the dx of a row
// add up to 0. Rounded, they do not cancel: so it is taken off before.

constexpr int64_t QUERIES = round_down(64, ROWS);  // of a block

// The queries of one batch row and key/value head, in float32: (group, padded t, width).
struct Queries {
  int64_t padded, width;  // width: of d_query, h rounded up to whole vectors
  float *query, *cotangent;
  float *query_tiles, *cotangent_tiles;  // the same in tiles
  float *top, *share, *delta;  // share: 1 / total; delta: of values without what they share
  float *key_common, *value_common;
};
static inline int64_t queries_size(const Attention& x, int64_t padded) {
  return x.group() * padded * (2 * x.h + 2 * x.v + 3) + x.h + x.v;
}

// Which keys of one head are seen by a query: the others may hold any number.
static void find_seen(const Attention& x, int64_t b, int64_t kv, uint8_t* seen) {
  std::fill_n(seen, x.s, uint8_t{0});
  const int32_t* segment = x.key_segment ? x.key_segment + b * x.s : nullptr;
  const int64_t head = kv * x.group(), heads = head + (x.dense_head ? x.group() : 1);
  for (int64_t n = head; n < heads; ++n)
    for (int64_t i = 0; i < x.t; ++i) {
      const int64_t row = b * x.t + i;
      const int64_t start = std::max(x.start[row], 0), stop = std::min<int64_t>(x.stop[row], x.s);
      const uint8_t* dense = x.dense ? x.dense_keys(b, n, i) : nullptr;
      for (int64_t j = start; j < stop; ++j)
        seen[j] |= (!segment || segment[j] == x.query_segment[row]) && (!dense || dense[j]);
    }
}

// What the rows of one head that are seen share: the mean of their directions, as long as the shortest of them. None is
// more than twice as long without it, so that one large row, which some queries do not see, costs these no digits.
template <typename T>
static void find_common(const T* from, const Layout& layout, const uint8_t* seen, int64_t s, int64_t width,
                        float* common) {
  Array<float> row(width);
  float shortest = INFINITY, count = 0;
  std::fill_n(common, width, 0.0f);
  for (int64_t j = 0; j < s; ++j) {
    if (!seen[j] || !copy_finite(from + j * layout.token, row, width)) continue;
    float square = 0;
    for (int64_t c = 0; c < width; ++c) square += row[c] * row[c];
    const float length = std::sqrt(square), inverse = 1 / length;
    for (int64_t c = 0; c < width; ++c) common[c] += row[c] * inverse;
    shortest = std::min(shortest, length), ++count;
  }
  float square = 0;
  for (int64_t c = 0; c < width; ++c) common[c] /= count, square += common[c] * common[c];
  // What differs more than it shares gains nothing. The square of the shortest may be neither 0 nor infinite.
  const float factor = square > 0.25f && shortest > 1e-18f && shortest < 1e18f ? shortest : 0;
  for (int64_t c = 0; c < width; ++c) common[c] = factor > 0 ? common[c] * factor : 0;
}

// delta of WIDTH rows: cotangent . (output - shift), and cotangent . output. The first is summed in the order of do v^T,
// so that a row that chooses one key finds no difference between both.
struct Deltas {
  Vector shifted{}, whole{};
};
template <typename C, typename O>
static inline Deltas deltas(const C* const* cotangents, const O* const* outputs, int64_t v, const float* shift,
                            float* columns) {
  Deltas delta;
  for_columns(cotangents, v, [&](int64_t c, Vector lanes) { store(columns + c * WIDTH, lanes); });
  for_columns(outputs, v, [&](int64_t c, Vector lanes) {
    const Vector cotangent = load(columns + c * WIDTH);
    delta.shifted += cotangent * (lanes - shift[c]);
    delta.whole += cotangent * lanes;
  });
  return delta;
}

template <typename T, typename O>
static void copy_queries(const Backward& x, int64_t b, int64_t kv, int64_t part, Queries& to) {
  const Layout query = tokens_first(x.t, x.n, x.h), output = tokens_first(x.t, x.n, x.v);
  const float* cotangents[WIDTH];
  const O* outputs[WIDTH];
  Array<float> columns(x.v * WIDTH);
  for (int64_t head = 0; head < x.group(); ++head)
    for (int64_t i = 0; i < x.t; ++i) {  // what pads the tokens stays zero, which sees nothing
      const int64_t at = head * to.padded + i, n = kv * x.group() + head, row = (b * x.n + n) * x.t + i;
      float *q = to.query + at * x.h, *cotangent = to.cotangent + at * x.v;
      copy_finite(static_cast<const T*>(x.query) + query.offset(b, i, n), q, x.h, query_factor(x));
      const int64_t place = output.offset(b, i, n);
      const bool ok = copy_finite(static_cast<const T*>(x.cotangent) + place, cotangent, x.v);
      cotangents[i % WIDTH] = ok ? cotangent : nullptr;
      outputs[i % WIDTH] = static_cast<const O*>(x.output) + place;
      for (int64_t c = 0; c < x.h; ++c) to.query_tiles[tiled(at, c, x.h)] = q[c];
      for (int64_t c = 0; c < x.v; ++c) to.cotangent_tiles[tiled(at, c, x.v)] = cotangent[c];
      to.top[at] = x.top[row];
      to.share[at] = !ok ? NAN : x.total[row] == 0 ? 0 : 1 / x.total[row];
      if ((i + 1) % WIDTH && i + 1 < x.t) continue;
      const int64_t count = i % WIDTH + 1, first = at + 1 - count;
      for (int64_t j = count; j < WIDTH; ++j) cotangents[j] = nullptr, outputs[j] = nullptr;
      const Deltas delta = deltas(cotangents, outputs, x.v, to.value_common, columns);
      for (int64_t j = 0; j < count; ++j) {
        to.delta[first + j] = cotangents[j] ? delta.shifted[j] : NAN;
        if (part == 0) x.delta[row + 1 - count + j] = cotangents[j] ? delta.whole[j] : NAN;  // all parts find the same
      }
    }
}

// LANES keys of one head, and the gradients of these.
struct KeyPanel {
  int64_t first, kv;
  float *key, *key_rows, *value;  // (h, LANES), (LANES, width), (v, LANES)
  float *d_key, *d_value;         // (h, LANES), (v, LANES)
  Ints index[2], segment[2];
  bool key_ok[LANES], value_ok[LANES];
};
static inline int64_t panel_size(const Attention& x, int64_t width) { return LANES * (2 * x.h + width + 2 * x.v); }

// Which keys of the panel query i of head n sees; none where i is beyond the last.
static inline Ints visible_keys(const Backward& x, int64_t b, int64_t n, int64_t i, int half, const KeyPanel& panel) {
  if (i >= x.t) return Ints{};
  const int64_t row = b * x.t + i;
  const Ints index = panel.index[half];
  Ints visible = (index >= x.start[row]) & (index < std::min<int32_t>(x.stop[row], static_cast<int32_t>(x.s)));
  if (x.query_segment) visible &= panel.segment[half] == x.query_segment[row];
  const int64_t key = panel.first + half * WIDTH;
  if (x.dense) visible &= dense_lanes(x.dense_keys(b, n, i) + key, x.s - key);
  return visible;
}

template <typename T>
static void begin_keys(const Backward& x, int64_t b, int64_t kv, const Queries& queries, KeyPanel& panel) {
  const Layout key = keys_layout(x, x.h), value = keys_layout(x, x.v);
  Array<float> row(x.v);
  std::fill_n(panel.d_key, x.h * LANES, 0.0f);
  std::fill_n(panel.d_value, x.v * LANES, 0.0f);
  std::fill_n(panel.key_rows, queries.width * LANES, 0.0f);
  for (int64_t lane = 0; lane < LANES; ++lane) {
    const int64_t j = std::min(panel.first + lane, x.s - 1);  // lanes beyond the last key repeat it, hidden
    float* key_row = panel.key_rows + lane * queries.width;
    panel.key_ok[lane] = copy_finite(static_cast<const T*>(x.key) + key.offset(b, j, kv), key_row, x.h);
    panel.value_ok[lane] = copy_finite(static_cast<const T*>(x.value) + value.offset(b, j, kv), row, x.v);
    for (int64_t c = 0; c < x.h; ++c) panel.key[c * LANES + lane] = key_row[c], key_row[c] -= queries.key_common[c];
    for (int64_t c = 0; c < x.v; ++c) panel.value[c * LANES + lane] = row[c] - queries.value_common[c];
    panel.index[lane / WIDTH][lane % WIDTH] = static_cast<int32_t>(panel.first + lane);
    if (x.key_segment) panel.segment[lane / WIDTH][lane % WIDTH] = x.key_segment[b * x.s + j];
  }
}

// Turns the scores of queries [first, first + count) into weights, in place.
static void weigh_keys(const Backward& x, int64_t b, int64_t n, int64_t first, int64_t count, bool masked,
                       const float* top, const float* share, const KeyPanel& panel, float* scores) {
  for (int64_t i = 0; i < count; ++i)
    for (int half = 0; half < 2; ++half) {
      float* at = scores + i * LANES + half * WIDTH;
      Vector weight = exp2(load(at) - top[i]) * share[i];
      if (masked) weight = visible_keys(x, b, n, first + i, half, panel) ? weight : Vector{};
      store(at, weight);
    }
}

// Turns do v^T into the gradients of the scores; `capped` is null or soft_cap * log2(e) * tanh.
static void score_gradients(int64_t count, const float* weights, const float* delta, const float* capped,
                            float soft_cap, float* gradients) {
  for (int64_t i = 0; i < count; ++i)
    for (int64_t lane = i * LANES; lane < (i + 1) * LANES; lane += WIDTH) {
      const Vector weight = load(weights + lane);
      Vector gradient = weight * (load(gradients + lane) - delta[i]);
      if (capped) {
        const Vector tanh = load(capped + lane) / (soft_cap * LOG2_E);
        gradient *= 1 - tanh * tanh;
      }
      store(gradients + lane, weight == 0 ? Vector{} : gradient);  // hidden, beside numbers that may have overflowed
    }
}

// A block of queries of one head against the panel.
static void backward_tile(const Backward& x, int64_t b, int64_t first, int64_t count, bool masked,
                          const Queries& queries, int64_t head, KeyPanel& panel, float* scores, float* d_query) {
  const int64_t at = head * queries.padded + first;
  const float *query = queries.query + at * x.h, *cotangent = queries.cotangent + at * x.v;
  const float *query_tiles = queries.query_tiles + at * x.h, *cotangent_tiles = queries.cotangent_tiles + at * x.v;
  float *gradients = scores + QUERIES * LANES, *capped = nullptr;
  multiply<1, false>({query_tiles, x.h, ROWS, panel.key, LANES, scores, LANES}, count, LANES, x.h);
  if (x.soft_cap > 0) {
    capped = gradients + QUERIES * LANES;
    cap_scores(scores, count * LANES, x.soft_cap);
    std::copy_n(scores, count * LANES, capped);
  }
  weigh_keys(x, b, panel.kv * x.group() + head, first, count, masked, queries.top + at, queries.share + at, panel, scores);
  multiply<1, true>({cotangent, 1, x.v, scores, LANES, panel.d_value, LANES}, x.v, LANES, count);
  multiply<1, false>({cotangent_tiles, x.v, ROWS, panel.value, LANES, gradients, LANES}, count, LANES, x.v);
  score_gradients(count, scores, queries.delta + at, capped, x.soft_cap, gradients);
  multiply<1, true>({query, 1, x.h, gradients, LANES, panel.d_key, LANES}, x.h, LANES, count);
  multiply<LANES, true>({gradients, LANES, 1, panel.key_rows, queries.width, d_query + at * queries.width, queries.width},
                 count, queries.width, LANES);
}

template <typename T>
static void finish_keys(const Backward& x, int64_t b, int64_t kv, const KeyPanel& panel, float factor) {
  const Layout key = tokens_first(x.s, x.k, x.h), value = tokens_first(x.s, x.k, x.v);
  for (int64_t lane = 0; lane < std::min<int64_t>(LANES, x.s - panel.first); ++lane) {
    T* d_key = static_cast<T*>(x.d_key) + key.offset(b, panel.first + lane, kv);
    T* d_value = static_cast<T*>(x.d_value) + value.offset(b, panel.first + lane, kv);
    for (int64_t c = 0; c < x.h; ++c)
      write(d_key + c, panel.key_ok[lane] ? panel.d_key[c * LANES + lane] * factor : 0);
    for (int64_t c = 0; c < x.v; ++c)
      write(d_value + c, panel.value_ok[lane] ? panel.d_value[c * LANES + lane] : 0);
  }
}

// Calls run(first, count, masked) for the queries that see any key of the panel, in blocks of whole groups of STEP.
template <int64_t STEP, typename Run>
static void for_queries(const Backward& x, int64_t b, const Range* ranges, const KeyPanel& panel, const Run& run) {
  const int64_t groups = blocks_of(x.t, STEP);
  for (int64_t group = 0, first; group < groups; group = std::max(group, first + 1)) {
    bool masked = false;  // of the groups from `first` on that see any of these keys
    for (first = group; group < groups && group < first + QUERIES / STEP; ++group) {
      const int64_t query = group * STEP, stop = std::min(query + STEP, x.t), head = panel.kv * x.group();
      int64_t from = panel.first, to = from + LANES;
      Sight one = sight_of(x, b, ranges[group], from, to);
      one = narrow(x, b, head, head + x.group(), query, stop, LANES, from, to, one);
      if (one == Sight::none) break;
      masked |= one == Sight::some;
    }
    if (group > first) run(first * STEP, (group - first) * STEP, masked);
  }
}

// The numbers of a call in float32.
template <typename T>
struct BackwardFloats {
  using Type = T;
  static constexpr int64_t STEP = ROWS;  // queries at a time
  struct Registers {
    Registers() {}
  };
  static int64_t scratch_size(const Attention& x) {
    return queries_size(x, round_up(x.t, STEP)) + panel_size(x, round_up(x.h, WIDTH)) + 3 * QUERIES * LANES;
  }
  static void run(const Backward& x, int64_t b, int64_t kv, int64_t part, int64_t parts, const Range* ranges,
                  float* scratch, float* d_query);
};

// Every `parts`-th panel of the keys of one head, from the `part`-th on, so that all parts of a causal call are alike.
template <typename T>
void BackwardFloats<T>::run(const Backward& x, int64_t b, int64_t kv, int64_t part, int64_t parts, const Range* ranges,
                            float* scratch, float* d_query) {
  const int64_t padded = round_up(x.t, STEP), width = round_up(x.h, WIDTH), rows = x.group() * padded;
  std::fill_n(scratch, queries_size(x, padded), 0.0f);
  Queries queries{padded, width, scratch, scratch + rows * x.h};
  queries.query_tiles = queries.cotangent + rows * x.v;
  queries.cotangent_tiles = queries.query_tiles + rows * x.h;
  queries.top = queries.cotangent_tiles + rows * x.v;
  queries.share = queries.top + rows;
  queries.delta = queries.share + rows;
  queries.key_common = queries.delta + rows;
  queries.value_common = queries.key_common + x.h;
  const Layout key = keys_layout(x, x.h), value = keys_layout(x, x.v);
  Array<uint8_t> seen(x.s);
  find_seen(x, b, kv, seen);
  // With sinks or a soft cap the gradients of the scores do not add up to 0.
  if (!x.sinks && x.soft_cap == 0)
    find_common(static_cast<const T*>(x.key) + key.offset(b, 0, kv), key, seen, x.s, x.h, queries.key_common);
  find_common(static_cast<const T*>(x.value) + value.offset(b, 0, kv), value, seen, x.s, x.v, queries.value_common);
  if (x.wide)
    copy_queries<T, float>(x, b, kv, part, queries);
  else
    copy_queries<T, T>(x, b, kv, part, queries);
  float* memory = queries.value_common + x.v;
  KeyPanel panel{};
  panel.kv = kv;
  panel.key = memory;
  panel.key_rows = panel.key + x.h * LANES;
  panel.value = panel.key_rows + width * LANES;
  panel.d_key = panel.value + x.v * LANES;
  panel.d_value = panel.d_key + x.h * LANES;
  float* scores = panel.d_value + x.v * LANES;
  std::fill_n(d_query, rows * width, 0.0f);
  for (panel.first = part * LANES; panel.first < x.s; panel.first += parts * LANES) {
    begin_keys<T>(x, b, kv, queries, panel);
    for_queries<STEP>(x, b, ranges, panel, [&](int64_t first, int64_t count, bool masked) {
      for (int64_t head = 0; head < x.group(); ++head)
        backward_tile(x, b, first, count, masked, queries, head, panel, scores, d_query);
    });
    // The copy of the query holds the scale.
    finish_keys<T>(x, b, kv, panel, x.soft_cap > 0 ? x.soft_cap : LN_2);
  }
}

// Sums what the parts found for the queries, and writes it.
template <typename T>
static void finish_queries(const Backward& x, int64_t b, int64_t n, int64_t first, int64_t last, int64_t parts,
                           int64_t part_step, const float* d_query, int64_t width) {
  const Layout layout = tokens_first(x.t, x.n, x.h);
  Array<float> row(width);
  for (int64_t i = first; i < last; ++i, d_query += width) {
    const int64_t place = layout.offset(b, i, n);
    const float factor = finite(static_cast<const T*>(x.query) + place, x.h) ? x.scale : 0;
    for (int64_t c = 0; c < width; c += WIDTH) {
      Vector total{};
      for (int64_t part = 0; part < parts; ++part) total += load(d_query + part * part_step + c);
      store(row + c, factor == 0 ? Vector{} : total * factor);
    }
    for (int64_t c = 0; c < x.h; ++c) write(static_cast<T*>(x.d_query) + place + c, row[c]);
  }
}

template <typename Numbers>
static void backward_all(const Backward& x, Pool& pool) {
  constexpr int64_t STEP = Numbers::STEP;
  const int64_t padded = round_up(x.t, STEP), width = round_up(x.h, WIDTH), heads = x.b * x.k;
  const int64_t parts = std::clamp<int64_t>(blocks_of(4 * pool.threads(), heads), 1, blocks_of(x.s, LANES));
  const int64_t part_step = x.group() * padded * width, blocks = blocks_of(x.t, QUERIES), groups = padded / STEP;
  const int64_t scratch = round_up(Numbers::scratch_size(x), WIDTH);
  std::vector<Range> ranges;
  for (int64_t b = 0; b < x.b; ++b)
    for (int64_t i = 0; i < groups; ++i) {
      ranges.push_back(range_of(x, b, i * STEP, std::min((i + 1) * STEP, x.t)));
      if ((i + 1) * STEP > x.t) ranges.back().inner_stop = 0;  // what pads the last group sees nothing
    }
  Array<float> scratches((pool.threads() + 1) * scratch), d_query(heads * parts * part_step);
  const int64_t work = x.b * x.n * x.t * x.s * (3 * x.h + 2 * x.v);
  parallel_for(pool, heads * parts, work, [&](int worker, int64_t task) {
    const int64_t b = task / parts / x.k, kv = task / parts % x.k;
    const typename Numbers::Registers registers;
    Numbers::run(x, b, kv, task % parts, parts, ranges.data() + b * groups, scratches + worker * scratch,
                 d_query + task * part_step);
  });
  parallel_for(pool, x.b * x.n * blocks, x.b * x.n * x.t * x.h * parts, [&](int, int64_t task) {
    const int64_t b = task / blocks / x.n, n = task / blocks % x.n, first = task % blocks * QUERIES;
    const float* from = d_query + (b * x.k + n / x.group()) * parts * part_step;
    from += (n % x.group() * padded + first) * width;
    const int64_t last = std::min(first + QUERIES, x.t);
    finish_queries<typename Numbers::Type>(x, b, n, first, last, parts, part_step, from, width);
  });
}
