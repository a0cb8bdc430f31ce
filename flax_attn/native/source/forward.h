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
  Ints seen[2], poisoned[2], query_nonfinite[2];  // lanes that saw a key; that saw one that is not finite
};

template <typename T>
static void begin_panel(const Attention& x, int64_t b, int64_t head, int64_t first, Panel& panel) {
  const int64_t last = std::min(first + LANES, x.t);
  panel.range = range_of(x, b, first, last);
  std::fill_n(panel.output, x.v * LANES, 0.0f);
  const Layout layout = tokens_first(x.t, x.n, x.h);
  Array<float> row(x.h);
  for (int64_t lane = 0; lane < LANES; ++lane) {
    const int64_t i = std::min(first + lane, x.t - 1), at = b * x.t + i;  // lanes beyond the last query repeat it
    const bool ok = copy_finite(static_cast<const T*>(x.query) + layout.offset(b, i, head), row, x.h, query_factor(x));
    for (int64_t c = 0; c < x.h; ++c) panel.query[c * LANES + lane] = row[c];
    const int64_t vector = lane / WIDTH, j = lane % WIDTH;
    panel.query_nonfinite[vector][j] = ok ? 0 : -1;
    panel.start[vector][j] = std::max(x.start[at], 0);
    panel.stop[vector][j] = std::min<int64_t>(x.stop[at], x.s);
    if (x.query_segment) panel.segment[vector][j] = x.query_segment[at];
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

// Writes -inf over the scores of keys [first, last) that are hidden.
static void hide(const Attention& x, const Keys& keys, int64_t b, int64_t kv, int64_t first, int64_t last, Panel& panel,
                 float* scores) {
  const uint8_t* nonfinite = keys.nonfinite + (b * x.k + kv) * keys.padded;
  for (int64_t j = first; j < last; ++j, scores += LANES)
    for (int half = 0; half < 2; ++half) {
      const int32_t index = static_cast<int32_t>(j);
      Ints visible = (panel.start[half] <= index) & (panel.stop[half] > index);
      if (x.key_segment && j < x.s) visible &= panel.segment[half] == x.key_segment[b * x.s + j];
      float* score = scores + half * WIDTH;
      store(score, visible ? load(score) : fill(-INFINITY));
      panel.seen[half] |= visible;
      if (nonfinite[j]) panel.poisoned[half] |= visible;
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
    const Vector factor = exp2(before - top);
    panel.top[half] = top;
    panel.total[half] = panel.total[half] * factor + (total + more);
    if (!any(top > before)) continue;
    for (int64_t c = 0; c < x.v; ++c) {
      float* output = panel.output + c * LANES + half * WIDTH;
      store(output, load(output) * factor);
    }
  }
}

// Attends from one panel to the keys [first, last), a multiple of ROWS apart.
static void attend(const Attention& x, const Keys& keys, int64_t b, int64_t kv, int64_t first, int64_t last,
                   Panel& panel, float* scores) {
  const Sight sight = sight_of(x, b, panel.range, first, last);
  if (sight == Sight::none) return;
  const int64_t at = (b * x.k + kv) * keys.padded + first, count = last - first;
  multiply<1, false>({keys.key + at * x.h, x.h, ROWS, panel.query, LANES, scores, LANES}, count, LANES, x.h);
  if (x.soft_cap > 0) cap_scores(scores, count * LANES, x.soft_cap);
  if (sight == Sight::some || keys.any_nonfinite)
    hide(x, keys, b, kv, first, last, panel, scores);
  else
    for (Ints& seen : panel.seen) seen = ~Ints{};
  weigh(x, count, panel, scores);
  multiply<1, true>({keys.value + at * x.v, 1, x.v, scores, LANES, panel.output, LANES}, x.v, LANES, count);
}

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
    for (int64_t c = 0; c < x.v; ++c) {
      float* output = panel.output + c * LANES + half * WIDTH;
      store(output, load(output) * share[half]);
    }
  }
  for (int64_t i = first; i < std::min(first + LANES, x.t); ++i) {
    T* output = static_cast<T*>(x.output) + layout.offset(b, i, head);
    for (int64_t c = 0; c < x.v; ++c) write(output + c, panel.output[c * LANES + (i - first)]);
    const int64_t row = (b * x.n + head) * x.t + i;
    x.top[row] = lanes[0][i - first];
    x.total[row] = lanes[1][i - first];
  }
}

template <typename T>
static void attend_block(const Forward& x, const Keys& keys, int64_t b, int64_t head, int64_t begin, float* scratch) {
  const int64_t kv = head / x.group(), count = std::min(PANELS, blocks_of(x.t - begin, LANES));
  Panel panels[PANELS];
  int64_t start = INT32_MAX, stop = 0;
  for (int64_t i = 0; i < count; ++i, scratch += (x.h + x.v) * LANES) {
    panels[i].query = scratch;
    panels[i].output = scratch + x.h * LANES;
    begin_panel<T>(x, b, head, begin + i * LANES, panels[i]);
    start = std::min(start, panels[i].range.start);
    stop = std::max(stop, panels[i].range.stop);
  }
  for (int64_t first = round_down(start, ROWS); first < stop; first += KEYS)
    for (int64_t i = 0; i < count; ++i) {
      const Range& range = panels[i].range;
      const int64_t from = std::max(first, round_down(range.start, ROWS));
      const int64_t to = std::min(first + KEYS, round_up(range.stop, ROWS));
      if (from < to) attend(x, keys, b, kv, from, to, panels[i], scratch);
    }
  for (int64_t i = 0; i < count; ++i) finish_panel<T>(x, b, head, begin + i * LANES, panels[i]);
}

template <typename T>
static void forward_many(const Forward& x, Pool& pool) {
  Keys keys(x);
  copy_keys<T>(x, keys, pool);
  const int64_t block = PANELS * LANES, heads = x.b * x.n, blocks = blocks_of(x.t, block);
  const int64_t scratch = PANELS * LANES * (x.h + x.v) + KEYS * LANES;
  Array<float> scratches((pool.threads() + 1) * scratch);
  parallel_for(pool, heads * blocks, heads * x.t * x.s * (x.h + x.v), [&](int worker, int64_t task) {
    // Blocks at the end of the queries first: under a causal mask they take longest.
    const int64_t begin = (blocks - 1 - task / heads) * block, head = task % heads;
    attend_block<T>(x, keys, head / x.n, head % x.n, begin, scratches + worker * scratch);
  });
}
