// Products with held matrices in bfloat16, which holds every number of them but for its scale: by the instruction of
// `dots.h`, and nothing is widened to float32.

// 32 integers of 8 bits, each of which bfloat16 holds.
static inline __m512i bfloats(const int8_t* x) {
  const Pair wide = load_pair(x);
  return (__m512i)_mm512_cvtne2ps_pbh((__m512)wide.second, (__m512)wide.first);
}
// 32 numbers of 8 bits, each with its sign in a lane.
static inline __m512i bfloats(const E4M3* x) {
  const __m512i lanes = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)x));
  const __m512i size = _mm512_and_si512(lanes, _mm512_set1_epi16(0x7f));
  const __m512i normal = _mm512_add_epi16(_mm512_slli_epi16(size, 4), _mm512_set1_epi16(120 << 7));
  // 0 to 7 times 2^-9, in the first lanes.
  const __m512i few = _mm512_castsi128_si512(
      _mm_setr_epi16(0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60));
  const __mmask32 subnormal = _mm512_cmplt_epi16_mask(size, _mm512_set1_epi16(8));
  const __mmask32 nan = _mm512_cmpeq_epi16_mask(size, _mm512_set1_epi16(0x7f));
  __m512i number = _mm512_mask_permutexvar_epi16(normal, subnormal, size, few);
  number = _mm512_mask_mov_epi16(number, nan, _mm512_set1_epi16(0x7fc0));
  const __m512i sign = _mm512_set1_epi16(-0x8000);
  return _mm512_ternarylogic_epi32(number, lanes, sign, 0xf8);  // number | (lanes & sign)
}
// 32 numbers of 4 bits.
static inline __m512i bfloats(const E2M1* x) {
  const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)x));
  const __m512i places = _mm512_or_si512(bytes, _mm512_slli_epi32(bytes, 12));
  // Of a place five bits are looked at, so that the numbers stand there twice.
  const __m256i numbers = _mm256_setr_epi16(0, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0, -0x8000, -0x4100,
                                            -0x4080, -0x4040, -0x4000, -0x3fc0, -0x3f80, -0x3f40);
  return _mm512_permutexvar_epi16(places, _mm512_broadcast_i64x4(numbers));
}

template <typename Code>
struct InDots {
  typedef BFloat16 X;
  static constexpr int64_t STEP = 32;
  static constexpr int64_t TALL_FROM = NEVER;
  static __m512i load(const Code* codes) { return bfloats(codes); }
  static Vector add(Vector sums, const BFloat16* x, __m512i right) {
    return (Vector)add_dots((__m512)sums, load_halves(x), right);
  }
  static void copy(const BFloat16* from, BFloat16* to, int64_t width) { std::copy_n(from, width, to); }
};
