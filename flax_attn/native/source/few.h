// Forward for a few queries over many keys, as in a step of decoding: keys and values are read once, where they are, and
// divided over the threads. Included once for each instruction level, inside its namespace.

constexpr int64_t CHUNK = 64;    // keys whose scores are held at once
constexpr int64_t TOGETHER = 4;  // rows that share what is read of a key
constexpr int64_t AHEAD = 48;    // keys from the one in use to the one that is fetched

// The queries of one key/value head over a part of its keys. Row r is token r % t of query head kv * group + r / t.
template <typename T>
struct FewRows {
  const Forward& x;
  int64_t b, head, rows;  // head: the first of the queries
  float* query;   // (rows, h), times the factor
  float* output;  // (rows, v), not divided by the totals yet
  float *top, *total;
  uint8_t* query_nonfinite;
  const T *key, *value;
  int64_t key_step, value_step;

  bool visible(int64_t row, int64_t j) const {
    const int64_t i = b * x.t + row % x.t;
    if (x.dense && !x.dense_keys(b, head + row / x.t, row % x.t)[j]) return false;
    return j >= x.start[i] && j < x.stop[i] && (!x.key_segment || x.query_segment[i] == x.key_segment[b * x.s + j]);
  }
};

// scores[i * CHUNK + j] = query row i . key j, for M rows and `count` keys `step` apart.
template <int M, typename T>
static inline void score(const float* query, const T* key, int64_t step, int64_t count, int64_t h, float* scores) {
  for (int64_t j = 0; j < count; j += WIDTH) {
    Vector sums[M][WIDTH] = {};
    for (int64_t k = 0; k < std::min<int64_t>(WIDTH, count - j); ++k, key += step) {
      Vector total[M] = {};
      int64_t c = 0;
      for (; c + WIDTH <= h; c += WIDTH) {
        fetch<WIDTH * sizeof(T)>(key + AHEAD * step + c);
        const Vector right = load(key + c);
        for (int i = 0; i < M; ++i) total[i] += load(query + i * h + c) * right;
      }
      if (c < h) {
        const Vector right = load_or_zero(key, c, h);
        for (int i = 0; i < M; ++i) total[i] += load_or_zero(query + i * h, c, h) * right;
      }
      for (int i = 0; i < M; ++i) sums[i][k] = total[i];
    }
    for (int i = 0; i < M; ++i) store(scores + i * CHUNK + j, sums_of(sums[i]));
  }
}

// output row i += the sum of weights[i * CHUNK + j] * value j, for M rows and `count` values `step` apart, in N vectors.
template <int M, int N, typename T>
static inline void add_columns(const float* weights, const T* value, int64_t step, int64_t count, int64_t v,
                               float* output) {
  Vector sums[M][N];
  for (int i = 0; i < M; ++i)
    for (int n = 0; n < N; ++n) sums[i][n] = load(output + i * v + n * WIDTH);
  for (int64_t j = 0; j < count; ++j, value += step)
    for (int n = 0; n < N; ++n) {
      fetch<WIDTH * sizeof(T)>(value + AHEAD * step + n * WIDTH);
      const Vector right = load(value + n * WIDTH);
      for (int i = 0; i < M; ++i) sums[i][n] += weights[i * CHUNK + j] * right;
    }
  for (int i = 0; i < M; ++i)
    for (int n = 0; n < N; ++n) store(output + i * v + n * WIDTH, sums[i][n]);
}
template <int M, typename T>
static inline void add(const float* weights, const T* value, int64_t step, int64_t count, int64_t v, float* output) {
  constexpr int N = ROWS / 2;
  int64_t c = 0;
  for (; c + N * WIDTH <= v; c += N * WIDTH) add_columns<M, N>(weights, value + c, step, count, v, output + c);
  for (; c + WIDTH <= v; c += WIDTH) add_columns<M, 1>(weights, value + c, step, count, v, output + c);
  for (int64_t j = 0; c < v && j < count; ++j)
    for (int64_t rest = c; rest < v; ++rest)
      for (int i = 0; i < M; ++i) output[i * v + rest] += weights[i * CHUNK + j] * read(value + j * step + rest);
}

// Turns the scores of one row into weights; -inf is hidden.
static inline void weigh_row(const Attention& x, int64_t row, float* scores, float* output, float& top, float& total) {
  Vector most = fill(top), sums{};
  for (int64_t j = 0; j < CHUNK; j += WIDTH) most = maximum(load(scores + j), most);
  const float before = top;
  for (int i = 0; i < WIDTH; ++i) top = most[i] > top ? most[i] : top;
  for (int64_t j = 0; j < CHUNK; j += WIDTH) {
    const Vector weight = exp2(load(scores + j) - top);
    store(scores + j, weight);
    sums += weight;
  }
  const float factor = exp2(fill(before - top))[0];
  total = total * factor + sum(sums);
  if (factor != 1)
    for (int64_t c = 0; c < x.v; ++c) output[row * x.v + c] *= factor;
}

// M rows from `row` on over the keys [first, last), at most CHUNK.
template <int M, typename T>
static void attend_rows(FewRows<T>& at, int64_t row, int64_t first, int64_t last, float* scores) {
  const Forward& x = at.x;
  std::fill_n(scores, M * CHUNK, 0.0f);
  score<M>(at.query + row * x.h, at.key + first * at.key_step, at.key_step, last - first, x.h, scores);
  if (x.soft_cap > 0) cap_scores(scores, M * CHUNK, x.soft_cap);
  bool shared = true;  // all keys, by all rows
  for (int i = 0; i < M; ++i) {
    bool poisoned = false;
    std::fill(scores + i * CHUNK + last - first, scores + (i + 1) * CHUNK, -INFINITY);
    for (int64_t j = first; j < last; ++j) {
      float& one = scores[i * CHUNK + j - first];
      if (!at.visible(row + i, j)) {
        one = -INFINITY;
        shared = false;
      } else if (at.query_nonfinite[row + i] || (!(one * 0 == 0) && !finite(at.key + j * at.key_step, x.h))) {
        poisoned = true;
      }
    }
    weigh_row(x, row + i, scores + i * CHUNK, at.output, at.top[row + i], at.total[row + i]);
    if (poisoned) at.total[row + i] = NAN;
  }
  const T* value = at.value + first * at.value_step;
  float* output = at.output + row * x.v;
  if (shared) return add<M>(scores, value, at.value_step, last - first, x.v, output);
  for (int64_t j = first; j < last; ++j, value += at.value_step)
    for (int i = 0; i < M; ++i)  // a weight of zero would not keep a NaN out
      if (at.visible(row + i, j)) add<1>(scores + i * CHUNK + (j - first), value, 0, 1, x.v, output + i * x.v);
}

// All rows over the keys [first, last).
template <typename T>
static void attend_part(FewRows<T>& at, int64_t first, int64_t last) {
  const Forward& x = at.x;
  float scores[TOGETHER * CHUNK];
  std::fill_n(at.output, at.rows * x.v, 0.0f);
  std::fill_n(at.top, at.rows, LOWEST);
  std::fill_n(at.total, at.rows, 0.0f);
  for (int64_t j = first; j < last; j += CHUNK) {
    const int64_t stop = std::min(j + CHUNK, last), heads = at.head + x.group();
    int64_t from = j, to = stop;  // the chunk stays whole: its lanes fix the order of sums
    if (narrow(x, at.b, at.head, heads, 0, x.t, WIDTH, from, to, Sight::some) == Sight::none) continue;
    int64_t row = 0;
    for (; row + TOGETHER <= at.rows; row += TOGETHER)
      attend_rows<TOGETHER>(at, row, j, stop, scores);
    for (; row < at.rows; ++row) attend_rows<1>(at, row, j, stop, scores);
  }
  for (int64_t row = 0; row < at.rows; ++row) {
    if (finite(at.output + row * x.v, x.v)) continue;  // of all that is not finite in values a trace is left there
    for (int64_t j = first; j < last; ++j)
      if (at.visible(row, j) && !finite(at.value + j * at.value_step, x.v)) at.total[row] = NAN;
  }
}

// Joins the parts of one row, and the sink, and writes what they found.
template <typename T>
static void join_parts(const Forward& x, int64_t b, int64_t head, int64_t i, int64_t parts, int64_t part_step,
                       const float* output, const float* top, const float* total) {
  float most = x.sinks ? x.sinks[b * x.n + head] * LOG2_E : LOWEST;
  most = most > LOWEST ? most : LOWEST;
  for (int64_t p = 0; p < parts; ++p) most = std::max(most, top[p * part_step]);
  float sums = x.sinks ? exp2(fill(x.sinks[b * x.n + head] * LOG2_E - most))[0] : 0;
  Array<float> row(x.v);
  std::fill_n(static_cast<float*>(row), x.v, 0.0f);
  for (int64_t p = 0; p < parts; ++p) {
    const float factor = exp2(fill(top[p * part_step] - most))[0];
    sums += total[p * part_step] * factor;
    for (int64_t c = 0; c < x.v; ++c) row[c] += output[p * part_step * x.v + c] * factor;
  }
  const int64_t at = (b * x.n + head) * x.t + i;
  x.top[at] = most;
  x.total[at] = sums;
  T* out = static_cast<T*>(x.output) + tokens_first(x.t, x.n, x.v).offset(b, i, head);
  for (int64_t c = 0; c < x.v; ++c) write(out + c, sums == 0 ? 0 : row[c] / sums);
  if (sums == sums && !finite(static_cast<const float*>(row), x.v)) sum_again<T>(x, b, head, i, most, sums);
}

template <typename T>
static void forward_few(const Forward& x, Pool& pool) {
  const int64_t heads = x.b * x.k, rows = x.group() * x.t, work = heads * rows * x.s * (x.h + x.v);
  const int64_t parts = std::clamp<int64_t>(blocks_of(4 * pool.threads(), heads), 1, blocks_of(x.s, 4 * CHUNK));
  Array<float> query(heads * parts * rows * x.h), output(heads * parts * rows * x.v);
  Array<float> top(heads * parts * rows), total(heads * parts * rows);
  Array<uint8_t> nonfinite(heads * parts * rows);
  const Layout queries = tokens_first(x.t, x.n, x.h), key = keys_layout(x, x.h), value = keys_layout(x, x.v);
  parallel_for(pool, heads * parts, work, [&](int, int64_t task) {
    const int64_t b = task / parts / x.k, kv = task / parts % x.k, part = task % parts, at = task * rows;
    FewRows<T> few{x, b, kv * x.group(), rows, query + at * x.h, output + at * x.v, top + at, total + at, nonfinite + at,
                   static_cast<const T*>(x.key) + key.offset(b, 0, kv),
                   static_cast<const T*>(x.value) + value.offset(b, 0, kv), key.token, value.token};
    for (int64_t row = 0; row < rows; ++row) {
      const T* from = static_cast<const T*>(x.query) + queries.offset(b, row % x.t, kv * x.group() + row / x.t);
      few.query_nonfinite[row] = !copy_finite(from, few.query + row * x.h, x.h, query_factor(x));
    }
    const Range range = range_of(x, b, 0, x.t);
    const int64_t count = range.empty() ? 0 : range.stop - range.start;
    attend_part(few, range.start + count * part / parts, range.start + count * (part + 1) / parts);
  });
  parallel_for(pool, x.b * x.n, x.b * x.n * x.t * parts * x.v, [&](int, int64_t task) {
    const int64_t b = task / x.n, head = task % x.n, kv = head / x.group();
    for (int64_t i = 0; i < x.t; ++i) {
      const int64_t row = (b * x.k + kv) * parts * rows + head % x.group() * x.t + i;
      join_parts<T>(x, b, head, i, parts, rows, output + row * x.v, top + row, total + row);
    }
  });
}
