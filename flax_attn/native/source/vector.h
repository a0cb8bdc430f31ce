// Vectors of floats, and the one register tile that all products are made of. Included once for each instruction level,
// inside its namespace, with VECTOR_BYTES and ROWS defined. The compiler's vector types serve every processor.

typedef float Vector __attribute__((vector_size(VECTOR_BYTES)));
typedef int32_t Ints __attribute__((vector_size(VECTOR_BYTES)));
typedef uint32_t Bits __attribute__((vector_size(VECTOR_BYTES)));
typedef uint16_t Halves __attribute__((vector_size(VECTOR_BYTES / 2)));

constexpr int WIDTH = VECTOR_BYTES / 4;
constexpr int LANES = 2 * WIDTH;  // two vectors hide the latency of a multiply-add
constexpr float LOWEST = -3e38f;  // below every score, and finite, so that a difference of two is no NaN

static inline Vector load(const float* x) {
  Vector y;
  __builtin_memcpy(&y, x, sizeof y);
  return y;
}
static inline void store(float* x, Vector y) { __builtin_memcpy(x, &y, sizeof y); }
static inline Vector fill(float x) { return x - Vector{}; }
static inline Ints fill(int32_t x) { return x - Ints{}; }
static inline Ints iota() {
  Ints x;
  for (int i = 0; i < WIDTH; ++i) x[i] = i;
  return x;
}
static inline Vector maximum(Vector x, Vector y) { return x > y ? x : y; }
// Over the lanes, four at a time.
typedef float Quad __attribute__((vector_size(16)));
static inline float sum(Vector x) {
  Quad parts[WIDTH / 4], total{};
  __builtin_memcpy(parts, &x, sizeof x);
  for (const Quad& part : parts) total += part;
  return (total[0] + total[2]) + (total[1] + total[3]);
}
static inline bool any(Ints x) { return sum(x ? fill(1.0f) : Vector{}) > 0; }

// Turns WIDTH rows into columns: in each pair of rows HALF apart the blocks of HALF numbers off the diagonal change places.
template <int HALF, int... I>
static inline void swap_blocks(Vector& first, Vector& second, std::integer_sequence<int, I...>) {
  const Vector rows = first;
  first = __builtin_shufflevector(rows, second, (I & HALF ? I - HALF + WIDTH : I)...);
  second = __builtin_shufflevector(rows, second, (I & HALF ? I + WIDTH : I + HALF)...);
}
template <int HALF = WIDTH / 2>
static inline void transpose(Vector* rows) {
  for (int i = 0; i < WIDTH; ++i)
    if (!(i & HALF)) swap_blocks<HALF>(rows[i], rows[i + HALF], std::make_integer_sequence<int, WIDTH>{});
  if constexpr (HALF > 1) transpose<HALF / 2>(rows);
}

// The sum of each of 2 HALF rows, on the lanes in their order: blocks change places as in `transpose`, and are added.
template <int HALF = WIDTH / 2>
static inline Vector sums_of(Vector* rows) {
  for (int i = 0; i < HALF; ++i) {
    swap_blocks<HALF>(rows[i], rows[i + HALF], std::make_integer_sequence<int, WIDTH>{});
    rows[i] += rows[i + HALF];
  }
  if constexpr (HALF > 1) return sums_of<HALF / 2>(rows);
  return rows[0];
}

// The lower types, read and written as their bits.
struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};
#ifdef __aarch64__
typedef __fp16 Half;  // as older compilers have it there
#else
typedef _Float16 Half;
#endif

static inline Bits half_bits(const uint16_t* x) {
  Halves y;
  __builtin_memcpy(&y, x, sizeof y);
  return __builtin_convertvector(y, Bits);
}
// The float32 of a lower type, whose bits are the low half of each lane.
template <typename T>
static inline Vector widen(Bits bits);
template <>
inline Vector widen<BFloat16>(Bits bits) {
  return (Vector)(bits << 16);
}
template <>
inline Vector widen<Float16>(Bits bits) {
  const Bits rest = bits & 0x7fff;
  // Subnormals are counted: as such they would be 0 in XLA's threads, which flush subnormal float32.
  const Vector subnormal = __builtin_convertvector((Ints)rest, Vector) * 0x1p-24f;
  const Bits normal = (rest << 13) + (112 << 23);                  // moves the bias of the exponent
  const Bits special = (Bits)((Ints)rest >= 0x7c00) & 0x7f800000;  // infinity and NaN
  const Bits number = (Ints)rest < 0x400 ? (Bits)subnormal : normal | special;
  return (Vector)(number | (bits & 0x8000) << 16);
}
template <typename T>
static inline Vector load(const T* x) {
  return widen<T>(half_bits(&x->bits));
}
static inline float read(const float* x) { return *x; }
template <typename T>
static inline float read(const T* x) {
  uint16_t bits[WIDTH] = {x->bits};
  return load(reinterpret_cast<const T*>(bits))[0];
}
static inline void write(float* x, float y) { *x = y; }
static inline void write(BFloat16* x, float y) {
  uint32_t bits;
  __builtin_memcpy(&bits, &y, sizeof bits);
  const bool nan = y != y;
  x->bits = nan ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;  // to nearest, ties to even
}
static inline void write(Float16* x, float y) {
  const Half half = static_cast<Half>(y);
  __builtin_memcpy(x, &half, sizeof half);
}

// Writes the first `count` numbers.
template <typename T>
static inline void write(T* to, Vector x, int64_t count) {
  for (int64_t i = 0; i < std::min<int64_t>(WIDTH, count); ++i) write(to + i, x[i]);
}
static inline void write(float* to, Vector x, int64_t count) {
  if (count >= WIDTH) return store(to, x);
  for (int64_t i = 0; i < count; ++i) to[i] = x[i];
}
#ifdef __AVX512BF16__
static inline void write(BFloat16* to, Vector x, int64_t count) {
  const __mmask16 mask = count >= WIDTH ? 0xffff : (1 << count) - 1;
  _mm256_mask_storeu_epi16(to, mask, (__m256i)_mm512_cvtneps_pbh(x));
}
#endif

// 2^x, 0 below the smallest normal number, NaN for NaN. The polynomial is the least-error one of degree 5 on
// [-0.5, 0.5], with a relative error of 2e-7.
static inline Vector exp2(Vector x) {
#if VECTOR_BYTES == 64
  const Vector fraction = _mm512_reduce_ps(x, 0);  // of the nearest integer
#else
  const Ints tiny = x < -126.0f;
  x = x < -126.0f ? fill(-126.0f) : x;
  x = x > 127.0f ? fill(127.0f) : x;
  const float round = 12582912.0f;  // 1.5 * 2^23: adding it leaves an integer in the low bits
  const Vector shifted = x + round, fraction = x - (shifted - round);
#endif
  Vector y = fill(1.32647273e-3f);
  y = y * fraction + 9.67151299e-3f;
  y = y * fraction + 5.55073358e-2f;
  y = y * fraction + 2.40222424e-1f;
  y = y * fraction + 6.93147004e-1f;
  y = y * fraction + 1.0f;
#if VECTOR_BYTES == 64
  return _mm512_scalef_ps(y, x - fraction);
#else
  y = (Vector)((Bits)y + ((Bits)shifted << 23));  // a NaN stays one: its lowest exponent bits alone change
  y = x != x ? x : y;
  return tiny ? Vector{} : y;
#endif
}

// tanh(x), by its series near 0 and else from 2^x, with a relative error of 3e-7.
static inline Vector tanh(Vector x) {
  const Vector size = x < 0 ? -x : x, square = x * x;
  const Vector power = exp2(size > 20.0f ? fill(57.7f) : size * 2.88539008f);  // e^(2 |x|)
  const Vector far = (power - 1) / (power + 1);
  Vector near = fill(-8.8632355e-3f);
  near = near * square + 2.1869489e-2f;
  near = near * square - 5.3968254e-2f;
  near = near * square + 1.3333333e-1f;
  near = near * square - 3.3333333e-1f;
  near = near * square * x + x;
  return size < 0.35f ? near : (x < 0 ? -far : far);
}

// C = or += A @ B, in tiles of rows. The scalars of the tile at a row begin at a + row * a_row; in it, those of one row
// are a_sum apart, and those of one term STEP, or a_row where that is 0. The rows of B and of C are b_row and c_row apart.
struct Product {
  const float* a;
  int64_t a_row, a_sum;
  const float* b;
  int64_t b_row;
  float* c;
  int64_t c_row;
};

template <int M, int N, int STEP, bool ADD>
static inline void tile(const Product& x, int64_t row, int64_t col, int64_t terms) {
  Vector sums[M][N] = {};
  const float *a = x.a + row * x.a_row, *b = x.b + col;
  for (int64_t r = 0; r < terms; ++r, a += x.a_sum, b += x.b_row) {
    Vector right[N];
    for (int j = 0; j < N; ++j) right[j] = load(b + j * WIDTH);
    for (int i = 0; i < M; ++i)
      for (int j = 0; j < N; ++j) sums[i][j] += a[i * (STEP ? STEP : x.a_row)] * right[j];
  }
  float* c = x.c + row * x.c_row + col;
  for (int i = 0; i < M; ++i, c += x.c_row)
    for (int j = 0; j < N; ++j) store(c + j * WIDTH, ADD ? load(c + j * WIDTH) + sums[i][j] : sums[i][j]);
}

template <int M, int N, int STEP, bool ADD>
static inline void tiles(const Product& x, int64_t& row, int64_t rows, int64_t col, int64_t terms) {
  for (; row + M <= rows; row += M) tile<M, N, STEP, ADD>(x, row, col, terms);
}

template <int N, int STEP, bool ADD>
static void columns(const Product& x, int64_t rows, int64_t col, int64_t terms) {
  int64_t row = 0;
  tiles<ROWS, N, STEP, ADD>(x, row, rows, col, terms);
  tiles<4, N, STEP, ADD>(x, row, rows, col, terms);
  tiles<1, N, STEP, ADD>(x, row, rows, col, terms);
}

// The whole product; `cols` is a multiple of WIDTH.
template <int STEP, bool ADD>
static inline void multiply(const Product& x, int64_t rows, int64_t cols, int64_t terms) {
  int64_t col = 0;
  for (; col + LANES <= cols; col += LANES) columns<2, STEP, ADD>(x, rows, col, terms);
  for (; col < cols; col += WIDTH) columns<1, STEP, ADD>(x, rows, col, terms);
}
