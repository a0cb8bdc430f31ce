// Forward for many queries. Queries lie on the lanes of vectors: S^T = K Q^T and O^T = V^T P^T, so that the maximum and
// the sum of a softmax never cross lanes. Included once for each instruction level, inside its namespace.
//
// A block of keys, held in the cache, serves the panels of a block of queries in turn. The softmax is computed as it goes
// (Milakov and Gimelshein 2018, arXiv:1805.02867; Dao 2023, arXiv:2307.08691):
//
//     m' = max(m, max x);  p = exp2(x - m');  l' = l exp2(m - m') + sum p;  o' = o exp2(m - m') + p V

constexpr int64_t PANELS = 128 / LANES > 4 ? 4 : 128 / LANES;  // of a block of queries
constexpr int64_t KEYS = round_down(128, ROWS);               // of a block

// LANES queries and what is known of them so far.
struct Panel {
  float* query;   // (h, LANES), times the factor
  float* output;  // (v, LANES)
  Range range;
  Vector top[2], total[2];
  Ints start[2], stop[2], segment[2];
  const uint8_t* dense[LANES];  // the keys of a dense mask
  Ints seen[2], poisoned[2], query_nonfinite[2];  // lanes that saw a key; that saw one that is not finite
};

template <typename Numbers>
static void begin_panel(const Attention& x, int64_t b, int64_t head, int64_t first, Panel& panel) {
  const int64_t last = std::min(first + LANES, x.t);
  panel.range = range_of(x, b, first, last);
  std::fill_n(panel.output, Numbers::output_size(x), 0.0f);
  using T = typename Numbers::Type;
  const Layout layout = tokens_first(x.t, x.n, x.h);
  for (int64_t half = 0; half < 2; ++half) {
    const T* queries[WIDTH];
    for (int64_t j = 0; j < WIDTH; ++j) {
      const int64_t i = std::min(first + half * WIDTH + j, x.t - 1), at = b * x.t + i;  // the last one fills the lanes
      queries[j] = static_cast<const T*>(x.query) + layout.offset(b, i, head);
      const bool ok = finite(queries[j], x.h, query_factor(x));
      if (!ok) queries[j] = nullptr;
      panel.query_nonfinite[half][j] = ok ? 0 : -1;
      panel.start[half][j] = std::max(x.start[at], 0);
      panel.stop[half][j] = std::min<int64_t>(x.stop[at], x.s);
      if (x.query_segment) panel.segment[half][j] = x.query_segment[at];
      if (x.dense) panel.dense[half * WIDTH + j] = x.dense_keys(b, head, i);
    }
    Numbers::copy_queries(x, queries, panel.query + half * WIDTH);
  }
  for (int j = 0; j < 2; ++j) {
    panel.top[j] = fill(LOWEST);
    panel.total[j] = Vector{};
    panel.seen[j] = panel.poisoned[j] = Ints{};
  }
}

static void cap_scores(float* scores, int64_t count, float soft_cap) {
  for (int64_t i = 0; i < count; i += WIDTH) store(scores + i, tanh(load(scores + i)) * (soft_cap * LOG2_E));
}

// Which lanes see keys [first, first + WIDTH) under a dense mask: (keys, LANES).
static void dense_columns(const Panel& panel, int64_t first, int64_t s, Ints (*visible)[2]) {
  for (int half = 0; half < 2; ++half) {
    Vector rows[WIDTH];
    for (int i = 0; i < WIDTH; ++i) rows[i] = (Vector)dense_lanes(panel.dense[half * WIDTH + i] + first, s - first);
    transpose(rows);
    for (int j = 0; j < WIDTH; ++j) visible[j][half] = (Ints)rows[j];
  }
}

// Writes -inf over the scores of keys [first, last) that are hidden.
static void hide(const Attention& x, const Keys& keys, int64_t b, int64_t kv, int64_t first, int64_t last, Sight sight,
                 Panel& panel, float* scores) {
  if (sight == Sight::all && !keys.any_nonfinite) {
    for (Ints& seen : panel.seen) seen = ~Ints{};
    return;
  }
  const uint8_t* nonfinite = keys.nonfinite + (b * x.k + kv) * keys.padded;
  Ints dense[WIDTH][2];
  for (int64_t j = first; j < last; ++j, scores += LANES) {
    const int64_t column = (j - first) % WIDTH;
    if (x.dense && column == 0) dense_columns(panel, j, x.s, dense);
    for (int half = 0; half < 2; ++half) {
      const int32_t index = static_cast<int32_t>(j);
      Ints visible = (panel.start[half] <= index) & (panel.stop[half] > index);
      if (x.key_segment && j < x.s) visible &= panel.segment[half] == x.key_segment[b * x.s + j];
      if (x.dense) visible &= dense[column][half];
      float* score = scores + half * WIDTH;
      store(score, visible ? load(score) : fill(-INFINITY));
      panel.seen[half] |= visible;
      if (nonfinite[j]) panel.poisoned[half] |= visible;
    }
  }
}

// Adds the sum of weights relative to a new largest score to what was found before.
static void fold(const Attention& x, int half, Vector top, Vector total, Panel& panel) {
  const Vector before = panel.top[half], factor = exp2(before - top);
  panel.top[half] = top;
  panel.total[half] = panel.total[half] * factor + total;
  if (!any(top > before)) return;
  for (int64_t c = 0; c < x.v; ++c) {
    float* output = panel.output + c * LANES + half * WIDTH;
    store(output, load(output) * factor);
  }
}

// Turns the scores of `count` keys into weights, relative to the largest so far.
static void weigh(const Attention& x, int64_t count, Panel& panel, float* scores) {
  for (int half = 0; half < 2; ++half) {
    float* column = scores + half * WIDTH;
    const Vector before = panel.top[half];
    Vector top = before, other = before, total{}, more{};
    int64_t j = 0;
    for (; j + 2 <= count; j += 2) {
      top = maximum(load(column + j * LANES), top);
      other = maximum(load(column + (j + 1) * LANES), other);
    }
    for (; j < count; ++j) top = maximum(load(column + j * LANES), top);
    top = maximum(top, other);
    for (j = 0; j + 2 <= count; j += 2) {
      const Vector p = exp2(load(column + j * LANES) - top), q = exp2(load(column + (j + 1) * LANES) - top);
      store(column + j * LANES, p);
      store(column + (j + 1) * LANES, q);
      total += p;
      more += q;
    }
    for (; j < count; ++j) {
      const Vector p = exp2(load(column + j * LANES) - top);
      store(column + j * LANES, p);
      total += p;
    }
    fold(x, half, top, total + more, panel);
  }
}

// The numbers of a call in float32.
template <typename T>
struct Float32 {
  static constexpr int64_t STEP = ROWS;  // keys at a time
  using Type = T;
  struct Registers {
    Registers() {}
  };
  FloatKeys keys;

  Float32(const Attention& x, Pool& pool) : keys(x) { copy_keys<T>(x, keys, pool); }

  static int64_t query_size(const Attention& x) { return x.h * LANES; }
  static int64_t output_size(const Attention& x) { return x.v * LANES; }
  static int64_t scores_size() { return KEYS * LANES; }

  // Copies queries, or zeros, into the lanes of a vector.
  static void copy_queries(const Attention& x, const T* const* queries, float* to) {
    const float factor = query_factor(x);
    for_columns(queries, x.h, [&](int64_t c, Vector lanes) { store(to + c * LANES, lanes * factor); });
  }

  // Attends from one panel to the keys [first, last), a multiple of STEP apart.
  void attend(const Attention& x, int64_t b, int64_t kv, int64_t first, int64_t last, Sight sight, Panel& panel,
              float* scores) const {
    const int64_t at = (b * x.k + kv) * keys.padded + first, count = last - first;
    multiply<1, false>({keys.key + at * x.h, x.h, ROWS, panel.query, LANES, scores, LANES}, count, LANES, x.h);
    if (x.soft_cap > 0) cap_scores(scores, count * LANES, x.soft_cap);
    hide(x, keys, b, kv, first, last, sight, panel, scores);
    weigh(x, count, panel, scores);
    multiply<1, true>({keys.value + at * x.v, 1, x.v, scores, LANES, panel.output, LANES}, x.v, LANES, count);
  }
};

// Divides by the sum, the sink included, and writes what the panel found.
template <typename T>
static void finish_panel(const Forward& x, int64_t b, int64_t head, int64_t first, Panel& panel) {
  const Layout layout = tokens_first(x.t, x.n, x.v);
  Vector share[2];
  for (int half = 0; half < 2; ++half) {
    Vector& total = panel.total[half];
    if (x.sinks) {  // a key that every row sees, with a value of zero
      const Vector sink = fill(x.sinks[b * x.n + head] * LOG2_E), top = maximum(sink, panel.top[half]);
      share[half] = exp2(panel.top[half] - top);
      total = total * share[half] + exp2(sink - top);
      panel.top[half] = top;
    } else {
      share[half] = fill(1.0f);
    }
    const Ints nan = panel.poisoned[half] | (panel.seen[half] & panel.query_nonfinite[half]);
    total = nan ? fill(NAN) : total;
    share[half] /= total == 0 ? fill(1.0f) : total;
  }
  float lanes[2][LANES];
  for (int half = 0; half < 2; ++half) {
    store(lanes[0] + half * WIDTH, panel.top[half]);
    store(lanes[1] + half * WIDTH, panel.total[half]);
  }
  const int64_t count = std::min<int64_t>(LANES, x.t - first);
  const int64_t row = (b * x.n + head) * x.t + first;
  std::copy_n(lanes[0], count, x.top + row);
  std::copy_n(lanes[1], count, x.total + row);
  Vector check[2] = {};  // 0 * x is 0 or NaN
  const auto put = [&](auto* output) {
    for (int64_t c = 0; c < x.v; c += WIDTH)
      for (int64_t half = 0; half * WIDTH < count; ++half) {
        Vector block[WIDTH];
        for (int64_t i = 0; i < WIDTH; ++i)
          block[i] = c + i < x.v ? load(panel.output + (c + i) * LANES + half * WIDTH) * share[half] : Vector{};
        for (const Vector& column : block) check[half] += column * 0.0f;
        transpose(block);
        for (int64_t i = 0; i < std::min<int64_t>(WIDTH, count - half * WIDTH); ++i)
          write(output + layout.offset(b, first + half * WIDTH + i, head) + c, block[i], x.v - c);
      }
  };
  if (x.wide)
    put(static_cast<float*>(x.output));
  else
    put(static_cast<T*>(x.output));
  for (int64_t i = 0; i < count; ++i) {
    const float sum = lanes[1][i];
    if (sum == sum && !(check[i / WIDTH][i % WIDTH] == 0)) sum_again<T>(x, b, head, first + i, lanes[0][i], sum);
  }
}

template <typename Numbers>
static void attend_block(const Forward& x, const Numbers& numbers, int64_t b, int64_t head, int64_t begin,
                         float* scratch) {
  constexpr int64_t STEP = Numbers::STEP;
  const int64_t kv = head / x.group(), count = std::min(PANELS, blocks_of(x.t - begin, LANES));
  Panel panels[PANELS];
  int64_t start = INT32_MAX, stop = 0;
  for (int64_t i = 0; i < count; ++i) {
    panels[i].query = scratch;
    panels[i].output = scratch + Numbers::query_size(x);
    scratch = panels[i].output + Numbers::output_size(x);
    begin_panel<Numbers>(x, b, head, begin + i * LANES, panels[i]);
    start = std::min(start, panels[i].range.start);
    stop = std::max(stop, panels[i].range.stop);
  }
  for (int64_t first = round_down(start, STEP); first < stop; first += KEYS)
    for (int64_t i = 0; i < count; ++i) {
      const Range& range = panels[i].range;
      const int64_t query = begin + i * LANES;
      int64_t from = std::max(first, round_down(range.start, STEP));
      int64_t to = std::min(first + KEYS, round_up(range.stop, STEP));
      Sight sight = from < to ? sight_of(x, b, range, from, to) : Sight::none;
      sight = narrow(x, b, head, head + 1, query, std::min(query + LANES, x.t), STEP, from, to, sight);
      if (sight != Sight::none) numbers.attend(x, b, kv, from, to, sight, panels[i], scratch);
    }
  for (int64_t i = 0; i < count; ++i)
    finish_panel<typename Numbers::Type>(x, b, head, begin + i * LANES, panels[i]);
}

template <typename Numbers>
static void forward_many(const Forward& x, Pool& pool) {
  const Numbers numbers(x, pool);
  const int64_t block = PANELS * LANES, heads = x.b * x.n, blocks = blocks_of(x.t, block);
  const int64_t scratch = PANELS * (Numbers::query_size(x) + Numbers::output_size(x)) + Numbers::scores_size();
  Array<float> scratches((pool.threads() + 1) * scratch);
  parallel_for(pool, heads * blocks, heads * x.t * x.s * (x.h + x.v), [&](int worker, int64_t task) {
    // Blocks at the end of the queries first: under a causal mask they take longest.
    const int64_t begin = (blocks - 1 - task / heads) * block, head = task % heads;
    const typename Numbers::Registers registers;
    attend_block(x, numbers, head / x.n, head % x.n, begin, scratches + worker * scratch);
  });
}
