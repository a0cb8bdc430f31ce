// Rows whose sum of weights times values overflowed although all numbers are finite: weights are at most 1, but there are
// many of them, and they are divided by their sum at the end alone. Such a row is computed again, with weights that are
// divided first. Included once for each instruction level, inside its namespace.

// The output of query i, given the largest score to base 2 and the sum of its softmax.
template <typename T>
static void sum_again(const Forward& x, int64_t b, int64_t head, int64_t i, float top, float total) {
  const int64_t at = b * x.t + i, kv = head / x.group();
  const Layout queries = tokens_first(x.t, x.n, x.h), keys = keys_layout(x, x.h), values = keys_layout(x, x.v);
  const T* query = static_cast<const T*>(x.query) + queries.offset(b, i, head);
  Array<double> sums(x.v);
  std::fill_n(static_cast<double*>(sums), x.v, 0.0);
  const int64_t stop = std::min<int64_t>(x.stop[at], x.s);
  for (int64_t j = std::max(x.start[at], 0); j < stop; ++j) {
    if (x.key_segment && x.query_segment[at] != x.key_segment[b * x.s + j]) continue;
    if (x.dense && !x.dense_keys(b, head, i)[j]) continue;
    const T* key = static_cast<const T*>(x.key) + keys.offset(b, j, kv);
    const T* value = static_cast<const T*>(x.value) + values.offset(b, j, kv);
    double score = 0;
    for (int64_t c = 0; c < x.h; ++c) score += static_cast<double>(read(query + c)) * read(key + c);
    score *= query_factor(x);
    if (x.soft_cap > 0) score = std::tanh(score) * x.soft_cap * LOG2_E;
    const double weight = std::exp2(score - top) / total;
    for (int64_t c = 0; c < x.v; ++c) sums[c] += weight * read(value + c);
  }
  const int64_t place = tokens_first(x.t, x.n, x.v).offset(b, i, head);
  for (int64_t c = 0; c < x.v; ++c) {
    const float number = static_cast<float>(sums[c]);
    if (x.wide)
      write(static_cast<float*>(x.output) + place + c, number);
    else
      write(static_cast<T*>(x.output) + place + c, number);
  }
}
