// A few rows times a matrix of int8, on the tiles of AMX. bfloat16 holds every int8, and a float32 is the sum of three
// numbers in bfloat16, so that all products are exact. Included inside the namespace of its level, behind tiles.h.

constexpr int64_t GROUPS = 4;                   // of SIDE columns, which together are a line of memory in each row
constexpr int64_t COLUMNS = GROUPS * SIDE;
constexpr int64_t MOST_PARTS = 3;

// The first 8 digits of a number, which are cut off it; what is left of infinity or NaN is 0.
static inline uint16_t cut(float& x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, sizeof bits);
  bits &= 0xffff0000;
  float first;
  __builtin_memcpy(&first, &bits, sizeof first);
  const bool nan = x != x;
  x -= first;
  if (x != x) x = 0;
  return nan ? 0x7fc0 : bits >> 16;
}

// 16 numbers of a row in float32, the low halves of whose bits are 0; zeros where the mask has none.
static inline __m512i int8_bits(const int8_t* from, __mmask16 mask) {
  const __m512i wide = _mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(mask, from));
  return _mm512_castps_si512(_mm512_cvtepi32_ps(wide));
}

// Two rows of one group of columns as pairs in bfloat16; `odd` is null where there is no second row.
static inline __m512i int8_pairs(const int8_t* even, const int8_t* odd, __mmask16 mask) {
  const __m512i second = odd ? int8_bits(odd, mask) : _mm512_setzero_si512();
  return _mm512_or_si512(_mm512_srli_epi32(int8_bits(even, mask), 16), second);
}

struct Int8Product {
  const MatrixProduct& p;
  int64_t parts, steps;  // of each row of x, and of TERMS rows of the matrix
  Array<uint16_t> x;     // (steps, parts, SIDE, TERMS)

  explicit Int8Product(const MatrixProduct& product)
      : p(product),
        parts(p.type == Type::bfloat16 ? 1 : MOST_PARTS),
        steps(blocks_of(p.d_in, TERMS)),
        x(steps * parts * TILE) {
    std::fill_n(static_cast<uint16_t*>(x), steps * parts * TILE, uint16_t{0});
    if (p.type == Type::float32) copy(static_cast<const float*>(p.x));
    if (p.type == Type::bfloat16) copy(static_cast<const BFloat16*>(p.x));
    if (p.type == Type::float16) copy(static_cast<const Float16*>(p.x));
  }

  template <typename Number>
  void copy(const Number* from) {
    for (int64_t i = 0; i < p.m; ++i) {
      for (int64_t c = 0; c < p.d_in; ++c) {
        float rest = read(from + i * p.d_in + c);
        uint16_t* to = x + c / TERMS * parts * TILE + i * TERMS + c % TERMS;
        for (int64_t part = 0; part < parts; ++part) to[part * TILE] = cut(rest);
      }
    }
  }

  // Writes TERMS rows of the matrix from `row` on, COLUMNS from `col` on, as a tile for each group.
  void widen(int64_t row, int64_t col, uint16_t* to) const {
    const int8_t* from = static_cast<const int8_t*>(p.matrix) + row * p.d_out + col;
    const int64_t rows = std::min(TERMS, p.d_in - row);
    const bool whole = rows == TERMS && p.d_out - col >= COLUMNS;
    for (int64_t r = 0; r < TERMS; r += 2, from += 2 * p.d_out) {
      // Rows far on are fetched while these are multiplied.
      if (r + row + 2 * TERMS + 1 < p.d_in) {
        _mm_prefetch(from + 2 * TERMS * p.d_out, _MM_HINT_T0);
        _mm_prefetch(from + (2 * TERMS + 1) * p.d_out, _MM_HINT_T0);
      }
      for (int64_t g = 0; g < GROUPS; ++g) {
        const int64_t count = std::clamp<int64_t>(p.d_out - col - g * SIDE, 0, SIDE);
        const __mmask16 mask = whole ? 0xffff : (1u << count) - 1;
        const int8_t *even = from + g * SIDE, *odd = even + p.d_out;
        __m512i pairs = _mm512_setzero_si512();
        if (whole || r < rows) pairs = int8_pairs(even, whole || r + 1 < rows ? odd : nullptr, mask);
        _mm512_store_si512(to + g * TILE + r * SIDE, pairs);
      }
    }
  }

  // The results of COLUMNS columns from `col` on.
  void multiply(int64_t col) const {
    alignas(64) uint16_t wide[GROUPS * TILE];
    alignas(64) float sums[SIDE * COLUMNS];
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t step = 0; step < steps; ++step) {
      widen(step * TERMS, col, wide);
      for (int64_t part = 0; part < parts; ++part) {
        _tile_loadd(4, x + (step * parts + part) * TILE, 64);
        _tile_loadd(5, wide, 64);
        _tile_dpbf16ps(0, 4, 5);
        _tile_loadd(6, wide + TILE, 64);
        _tile_dpbf16ps(1, 4, 6);
        _tile_loadd(7, wide + 2 * TILE, 64);
        _tile_dpbf16ps(2, 4, 7);
        _tile_loadd(5, wide + 3 * TILE, 64);
        _tile_dpbf16ps(3, 4, 5);
      }
    }
    _tile_stored(0, sums, COLUMNS * 4);
    _tile_stored(1, sums + SIDE, COLUMNS * 4);
    _tile_stored(2, sums + 2 * SIDE, COLUMNS * 4);
    _tile_stored(3, sums + 3 * SIDE, COLUMNS * 4);
    const int64_t count = std::min(COLUMNS, p.d_out - col);
    for (int64_t i = 0; i < p.m; ++i)
      std::copy_n(sums + i * COLUMNS, count, static_cast<float*>(p.result) + i * p.d_out + col);
  }
};

static void multiply_int8(const MatrixProduct& p, Pool& pool) {
  const Int8Product product(p);
  parallel_for(pool, blocks_of(p.d_out, COLUMNS), p.m * p.d_in * p.d_out, [&](int, int64_t task) {
    const TileRegisters registers;
    product.multiply(task * COLUMNS);
  });
}
