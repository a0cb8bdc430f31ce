// A few rows of bfloat16 times a matrix of bfloat16, by the instruction that multiplies pairs of such numbers and sums in
// float32: twice as many products as `product.h` has, and nothing is widened. It takes numbers below 2**-126 as 0.

typedef Part<BFloat16, BFloat16> BPart;

static inline __m512i load_halves(const BFloat16* x) { return _mm512_loadu_si512(x); }
static inline __m512 add_dots(__m512 sums, __m512i x, __m512i y) {
  return _mm512_dpbf16_ps(sums, (__m512bh)x, (__m512bh)y);
}
// Two numbers, in all lanes.
static inline __m512i fill_pair(const BFloat16* x) {
  int32_t pair;
  __builtin_memcpy(&pair, x, sizeof pair);
  return _mm512_set1_epi32(pair);
}

// Pair j of rows r and r + 1 of the matrix, that of the second 0 behind the last: each two numbers of a column together.
struct PairOfRows {
  __m512i first, second;
  // Adds their products with two numbers of x to two sums. A row of x ends with a zero where its width is odd.
  void add_products(const BFloat16* x, Vector& first_sums, Vector& second_sums) const {
    first_sums = add_dots(first_sums, fill_pair(x), first);
    second_sums = add_dots(second_sums, fill_pair(x), second);
  }
};
static inline PairOfRows right_of(const BPart& part, int64_t r, int j, int64_t depth) {
  const BFloat16* from = part.matrix + r * part.matrix_row + j * PAIR;
  fetch<PAIR * sizeof(BFloat16)>(from + part.ahead);
  const __m512i first = load_halves(from);
  __m512i second{};
  if (r + 1 < depth) {
    fetch<PAIR * sizeof(BFloat16)>(from + part.matrix_row + part.ahead);
    second = load_halves(from + part.matrix_row);
  }
  return {_mm512_unpacklo_epi16(first, second), _mm512_unpackhi_epi16(first, second)};
}
static inline void store(float* x, const PairOfRows& y) {
  _mm512_storeu_si512(x, y.first);
  _mm512_storeu_si512(x + WIDTH, y.second);
}
static inline PairOfRows load_kept(const BPart&, const float* x) {
  return {_mm512_loadu_si512(x), _mm512_loadu_si512(x + WIDTH)};
}

// total += x (M, PAIR) @ matrix (R, PAIR)^T, of what `load` reads.
template <int M, int R, typename Load>
static inline void add_columns(const BPart& part, const BFloat16* x, int64_t c, __m512 (&total)[M][R], Load load) {
  __m512i right[R];
  for (int j = 0; j < R; ++j) right[j] = load(part.matrix + j * part.matrix_row + c);
  for (int i = 0; i < M; ++i) {
    const __m512i left = load(x + i * part.x_row + c);
    for (int j = 0; j < R; ++j) total[i][j] = add_dots(total[i][j], left, right[j]);
  }
}

// sums (M, R) = x (M, width) @ matrix (R, width)^T, from a row of x on.
template <int M, int R>
static inline void dot_products(const BPart& part, int64_t row, int64_t width) {
  __m512 total[M][R] = {};
  const BFloat16* x = part.x + row * part.x_row;
  int64_t c = 0;
  for (; c + PAIR <= width; c += PAIR) {
    for (int j = 0; j < R; ++j) fetch<PAIR * sizeof(BFloat16)>(part.matrix + j * part.matrix_row + c + part.ahead);
    add_columns<M, R>(part, x, c, total, load_halves);
  }
  const __mmask32 inside = (__mmask32{1} << (width - c)) - 1;
  const auto load_rest = [&](const BFloat16* from) { return _mm512_maskz_loadu_epi16(inside, from); };
  if (c < width) add_columns<M, R>(part, x, c, total, load_rest);
  for (int i = 0; i < M; ++i)
    for (int j = 0; j < R; ++j) part.sums[(row + i) * part.sums_row + j] = sum((Vector)total[i][j]);
}

static void copy_row(const BFloat16* from, BFloat16* to, int64_t width, bool) {
  std::copy_n(from, width, to);
  if (width % 2) to[width] = BFloat16{};
}
