// Rows times matrices (d_out, d_in) that are held in 8 or 4 bits with a scale for each block: a matrix is read as it is
// held, and its numbers live in registers only. Included once for each instruction level, inside its namespace.

// Numbers of 8 bits with 4 of exponent and 3 of mantissa; infinity is none of them.
struct E4M3 {
  int8_t bits;
};
// Two numbers of 4 bits with 2 of exponent and 1 of mantissa, that of the lower bits first.
struct E2M1 {
  int8_t bits;
};
// A scale of 8 bits of exponent.
struct E8M0 {
  uint8_t bits;
};

// How many numbers lie in an element of a matrix.
template <typename Code>
constexpr int64_t HELD_IN = std::is_same<Code, E2M1>::value ? 2 : 1;

// WIDTH bytes, each with its sign in a lane.
static inline Ints load_bytes(const int8_t* x) {
  // From a vector of bytes compilers make several halves.
#if VECTOR_BYTES == 64
  return (Ints)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)x));
#elif VECTOR_BYTES == 32
  return (Ints)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)x));
#else
  typedef int16_t Shorts __attribute__((vector_size(2 * WIDTH)));
  Bytes y;
  __builtin_memcpy(&y, x, sizeof y);
  const Shorts wide = __builtin_convertvector(y, Shorts);
  return __builtin_convertvector(wide, Ints);
#endif
}
static inline Vector signed_as(Bits number, Ints sign) { return (Vector)(number | ((Bits)sign & 0x80000000)); }
static inline Vector float_of_e4m3(Ints x) {
  const Bits size = (Bits)x & 0x7f;
  const Bits normal = (size << 20) + (120 << 23);  // moves the bias of the exponent
  const Vector subnormal = __builtin_convertvector((Ints)size, Vector) * 0x1p-9f;
  const Bits number = (Ints)size < 8 ? (Bits)subnormal : normal;
  return signed_as((Ints)size == 0x7f ? Bits{} + 0x7fc00000 : number, x);
}
// Of the lowest four bits.
static inline Vector float_of_e2m1(Ints x) {
#if VECTOR_BYTES == 64
  const __m512 numbers = _mm512_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6);
  return (Vector)_mm512_permutexvar_ps((__m512i)x, numbers);
#elif VECTOR_BYTES == 32
  const __m256 numbers = _mm256_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6);
  return signed_as((Bits)_mm256_permutevar8x32_ps(numbers, (__m256i)x), x << 28);
#else
  const Bits size = (Bits)x & 7;
  const Bits normal = (size << 22) + (126 << 23);
  const Vector subnormal = __builtin_convertvector((Ints)size, Vector) * 0.5f;
  return signed_as((Ints)size < 2 ? (Bits)subnormal : normal, x << 28);
#endif
}

// Two vectors of the numbers at `x`: of E2M1 those at even places, and the others.
static inline Pair load_pair(const int8_t* x) {
  return {__builtin_convertvector(load_bytes(x), Vector), __builtin_convertvector(load_bytes(x + WIDTH), Vector)};
}
static inline Pair load_pair(const E4M3* x) {
#if VECTOR_BYTES == 64
  // Moved to the places of a float16 they count 2^-8 of what they are. Those below 2^-14 stay, as this widening reads
  // them also where XLA's threads take small float32 as 0.
  const __m512i lanes = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)x));
  const __m512i size = _mm512_set1_epi16(0x7f);
  const __mmask32 nan = _mm512_cmpeq_epi16_mask(_mm512_and_si512(lanes, size), size);
  const __m512i moved = _mm512_and_si512(_mm512_slli_epi16(lanes, 7), _mm512_set1_epi16(-0x4080));
  const __m512i halves = _mm512_mask_mov_epi16(moved, nan, _mm512_set1_epi16(0x7e00));
  return {(Vector)_mm512_cvtph_ps(_mm512_castsi512_si256(halves)) * 256,
          (Vector)_mm512_cvtph_ps(_mm512_extracti64x4_epi64(halves, 1)) * 256};
#else
  return {float_of_e4m3(load_bytes(&x->bits)), float_of_e4m3(load_bytes(&x->bits + WIDTH))};
#endif
}
static inline Pair load_pair(const E2M1* x) {
  const Ints both = load_bytes(&x->bits);
  return {float_of_e2m1(both), float_of_e2m1(both >> 4)};
}
static inline float read_at(const int8_t* x, int64_t i) { return x[i]; }
static inline float read_at(const E4M3* x, int64_t i) { return float_of_e4m3(fill(int32_t{x[i].bits}))[0]; }
static inline float read_at(const E2M1* x, int64_t i) { return float_of_e2m1(fill(x[i / 2].bits >> 4 * (i % 2)))[0]; }
static inline float read(const E8M0* x) {
  // 2^-127 is 0 in XLA's threads, as are all float32 below 2^-126.
  const uint32_t bits = x->bits == 0xff ? 0x7fc00000 : uint32_t{x->bits} << 23;
  float y;
  __builtin_memcpy(&y, &bits, sizeof y);
  return y;
}

// Rows of a matrix, from one on. A block of (block_out, block_in) of the matrix has one scale.
template <typename Code, typename Scale>
struct HeldRows {
  const Code* codes;
  const Scale* scales;
  int64_t first, d_in, block_out, block_in;
  const Code* row(int64_t i) const { return codes + (first + i) * (d_in / HELD_IN<Code>); }
  const Scale* scales_of(int64_t i) const { return scales + (first + i) / block_out * blocks_of(d_in, block_in); }
};

// From how many rows of x on `tall_products` is quicker.
constexpr int64_t NEVER = INT64_MAX;

// The sums of products in float32; beside E2M1, of each STEP numbers of x those at even places come first.
template <typename Code>
struct InFloats {
  typedef float X;
  static constexpr int64_t STEP = PAIR;
  // Keeping what is widened pays where widening is long: measured at 8 and 16 rows of x.
  static constexpr int64_t TALL_FROM =
      std::is_same<Code, E4M3>::value ? (WIDTH >= 8 ? 8 : NEVER) : WIDTH < 16 ? NEVER : HELD_IN<Code> == 2 ? 8 : 16;
  static Pair load(const Code* codes) { return load_pair(codes); }
  static Vector add(Vector sums, const float* x, const Pair& right) {
    const Pair left = load_pair(x);
    sums += left.first * right.first;
    return sums + left.second * right.second;
  }
  template <typename T>
  static void copy(const T* from, float* to, int64_t width) {
    for (int64_t i = 0; i < width; ++i) {
      const bool turns = HELD_IN<Code> == 2 && i < width / STEP * STEP;
      to[turns ? i / STEP * STEP + i % 2 * WIDTH + i % STEP / 2 : i] = read(from + i);
    }
  }
};

// to (M, R) = x (M, d_in) @ rows (R, d_in)^T. Whatever M and R are, each sum has one order.
template <int M, int R, typename Sums, typename Code, typename Scale>
static inline void held_products(const typename Sums::X* x, const HeldRows<Code, Scale>& rows, float* to,
                                 int64_t to_row) {
  const int64_t d_in = rows.d_in, ahead = 2 * DOTS * (d_in / HELD_IN<Code>);
  Vector total[M][R] = {};
  const Code* codes[R];
  const Scale* scales[R];
  for (int j = 0; j < R; ++j) codes[j] = rows.row(j), scales[j] = rows.scales_of(j);
  int64_t c = 0, block = 0;
  // A block of one step: its sums need no memory.
  for (; rows.block_in == Sums::STEP && c + Sums::STEP <= d_in; ++block, c += Sums::STEP) {
    for (int j = 0; j < R; ++j) {
      const Code* const from = codes[j] + c / HELD_IN<Code>;
      fetch<64>(from + ahead);
      const auto right = Sums::load(from);
      const float scale = read(scales[j] + block);
      for (int i = 0; i < M; ++i) total[i][j] += Sums::add(Vector{}, x + i * d_in + c, right) * scale;
    }
  }
  for (; block * rows.block_in < d_in; ++block) {
    const int64_t end = std::min(d_in, (block + 1) * rows.block_in);
    Vector part[M][R] = {};
    for (; c + Sums::STEP <= end; c += Sums::STEP) {
      for (int j = 0; j < R; ++j) {
        const Code* const from = codes[j] + c / HELD_IN<Code>;
        fetch<64>(from + ahead);
        const auto right = Sums::load(from);
        for (int i = 0; i < M; ++i) part[i][j] = Sums::add(part[i][j], x + i * d_in + c, right);
      }
    }
    for (int j = 0; j < R; ++j) {
      const float scale = read(scales[j] + block);
      for (int i = 0; i < M; ++i) total[i][j] += part[i][j] * scale;
    }
  }
  for (int i = 0; i < M; ++i) {
    for (int j = 0; j < R; ++j) {
      float one = sum(total[i][j]);
      // Only the last block ends within a step.
      for (int64_t k = c; k < d_in; ++k) one += read(x + i * d_in + k) * read_at(codes[j], k) * read(scales[j] + block - 1);
      to[i * to_row + j] = one;
    }
  }
}

// More rows of x than a tile has: what they are multiplied by is widened once for all, some steps at a time, which stay in
// the nearest cache.
constexpr int64_t TALL = 16, STEPS = 8;

// sums (M, R) += x (M, steps) @ wide (R, steps)^T; each step is scaled by itself where there are scales.
template <int M, int R, typename Sums, typename Wide>
static inline void add_wide(const typename Sums::X* x, int64_t d_in, int64_t steps, const Wide (*wide)[R],
                            const float (*scales)[R], Vector (*sums)[R]) {
  Vector own[M][R];
  for (int i = 0; i < M; ++i)
    for (int j = 0; j < R; ++j) own[i][j] = sums[i][j];
  if (scales)
    for (int64_t s = 0; s < steps; ++s)
      for (int j = 0; j < R; ++j)
        for (int i = 0; i < M; ++i)
          own[i][j] += Sums::add(Vector{}, x + i * d_in + s * Sums::STEP, wide[s][j]) * scales[s][j];
  else
    for (int64_t s = 0; s < steps; ++s)
      for (int j = 0; j < R; ++j)
        for (int i = 0; i < M; ++i) own[i][j] = Sums::add(own[i][j], x + i * d_in + s * Sums::STEP, wide[s][j]);
  for (int i = 0; i < M; ++i)
    for (int j = 0; j < R; ++j) sums[i][j] = own[i][j];
}

// to (m, R) = x (m, d_in) @ rows (R, d_in)^T, m at most TALL; each sum in the order of `held_products`.
template <int R, typename Sums, typename Code, typename Scale>
static inline void tall_products(const typename Sums::X* x, int64_t m, const HeldRows<Code, Scale>& rows, float* to,
                                 int64_t to_row) {
  const int64_t d_in = rows.d_in, ahead = 2 * DOTS * (d_in / HELD_IN<Code>);
  const bool by_step = rows.block_in == Sums::STEP;
  Vector total[TALL][R] = {}, part[TALL][R] = {};
  decltype(Sums::load(rows.codes)) wide[STEPS][R];
  float scales[STEPS][R];
  int64_t c = 0, block = 0;
  while (c + Sums::STEP <= d_in) {
    const int64_t end = by_step ? d_in : std::min(d_in, (block + 1) * rows.block_in);
    const int64_t steps = std::min(STEPS, (end - c) / Sums::STEP);
    for (int j = 0; j < R; ++j) {
      const Code* const from = rows.row(j) + c / HELD_IN<Code>;
      for (int64_t s = 0; s < steps; ++s) {
        fetch<64>(from + s * Sums::STEP / HELD_IN<Code> + ahead);
        wide[s][j] = Sums::load(from + s * Sums::STEP / HELD_IN<Code>);
        if (by_step) scales[s][j] = read(rows.scales_of(j) + block + s);
      }
    }
    by_rows(m, [&](auto height, int64_t i) {
      add_wide<height, R, Sums>(x + i * d_in + c, d_in, steps, wide, by_step ? scales : nullptr,
                                (by_step ? total : part) + i);
    });
    c += steps * Sums::STEP;
    if (by_step) {
      block += steps;
    } else if (c + Sums::STEP > end) {
      for (int j = 0; j < R; ++j) {
        const float scale = read(rows.scales_of(j) + block);
        for (int64_t i = 0; i < m; ++i) total[i][j] += part[i][j] * scale, part[i][j] = Vector{};
      }
      ++block;
    }
  }
  const int64_t last = blocks_of(d_in, rows.block_in) - 1;
  for (int64_t i = 0; i < m; ++i) {
    for (int j = 0; j < R; ++j) {
      float one = sum(total[i][j]);
      for (int64_t k = c; k < d_in; ++k)
        one += read(x + i * d_in + k) * read_at(rows.row(j), k) * read(rows.scales_of(j) + last);
      to[i * to_row + j] = one;
    }
  }
}

template <typename T, typename Sums, typename Code, typename Scale>
static void multiply_held(const QuantizedProduct& p, Pool& pool) {
  typedef typename Sums::X X;
  const bool as_it_is = std::is_same<T, X>::value && HELD_IN<Code> == 1;
  const Array<X> copy(as_it_is ? 0 : p.m * p.d_in);
  const X* const x = as_it_is ? static_cast<const X*>(p.x) : copy;
  if (!as_it_is)
    parallel_for(pool, p.m, p.m * p.d_in, [&](int, int64_t i) {
      Sums::copy(static_cast<const T*>(p.x) + i * p.d_in, copy + i * p.d_in, p.d_in);
    });
  std::vector<int64_t> starts(1, 0);
  for (int64_t g = 0; g < p.groups; ++g)
    starts.push_back(p.sizes ? std::clamp<int64_t>(starts[g] + p.sizes[g], starts[g], p.m) : p.m);
  std::fill_n(p.result + starts.back() * p.d_out, (p.m - starts.back()) * p.d_out, 0.0f);
  const int64_t count = round_up(blocks_of(p.d_out, 4 * (pool.threads() + 1)), DOTS), chunks = blocks_of(p.d_out, count);
  const int64_t scales = blocks_of(p.d_out, p.block_out) * blocks_of(p.d_in, p.block_in);
  parallel_for(pool, p.groups * chunks, p.m * p.d_in * p.d_out, [&](int, int64_t task) {
    const int64_t g = task / chunks, end = std::min(p.d_out, (task % chunks + 1) * count);
    HeldRows<Code, Scale> rows{static_cast<const Code*>(p.matrix) + g * p.d_out * (p.d_in / HELD_IN<Code>),
                               static_cast<const Scale*>(p.scale) + g * scales, task % chunks * count, p.d_in,
                               p.block_out, p.block_in};
    const auto multiply = [&](auto width) {
      int64_t start = starts[g];
      while (starts[g + 1] - start >= Sums::TALL_FROM) {
        const int64_t m = std::min(TALL, starts[g + 1] - start);
        tall_products<width, Sums>(x + start * p.d_in, m, rows, p.result + start * p.d_out + rows.first, p.d_out);
        start += m;
      }
      by_rows(starts[g + 1] - start, [&](auto height, int64_t row) {
        const int64_t i = start + row;
        held_products<height, width, Sums>(x + i * p.d_in, rows, p.result + i * p.d_out + rows.first, p.d_out);
      });
      rows.first += width;
    };
    while (rows.first + DOTS <= end) multiply(std::integral_constant<int, DOTS>{});
    while (rows.first < end) multiply(std::integral_constant<int, 1>{});
  });
}
