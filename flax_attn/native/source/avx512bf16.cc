// The kernels for processors with AVX-512 that multiply pairs of bfloat16: products of a few rows, and else those for
// AVX-512.
#include "includes.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC target("avx512bf16,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")

#define VECTOR_BYTES 64
#define ROWS 8

namespace flax_attn::avx512bf16 {

#include "vector.h"
#include "rows.h"
#include "product.h"
#include "dots.h"
#include "quantized.h"
#include "quantized_dots.h"

static void product(const MatrixProduct& x, Pool& pool) {
  if (x.type != Type::bfloat16) return avx512_kernels()->product(x, pool);
  if (x.result_type == Type::float32) return multiply_few<BFloat16, BFloat16, float, BFloat16>(x, pool);
  multiply_few<BFloat16, BFloat16, BFloat16, BFloat16>(x, pool);
}

static void quantized(const QuantizedProduct& x, Pool& pool) {
  if (x.type == Type::bfloat16 && x.codes == Codes::int8)
    return multiply_held<BFloat16, InDots<int8_t>, int8_t, float>(x, pool);
  if (x.type == Type::bfloat16 && x.codes == Codes::e4m3)
    return multiply_held<BFloat16, InDots<E4M3>, E4M3, float>(x, pool);
  if (x.type == Type::bfloat16 && x.codes == Codes::e2m1)
    return multiply_held<BFloat16, InDots<E2M1>, E2M1, E8M0>(x, pool);
  avx512_kernels()->quantized(x, pool);
}

}  // namespace flax_attn::avx512bf16

const flax_attn::Kernels* flax_attn::avx512bf16_kernels() {
  if (!avx512_kernels() || !__builtin_cpu_supports("avx512bf16")) return nullptr;
  static const Kernels kernels{"avx512bf16", avx512_kernels()->forward, avx512_kernels()->backward,
                               avx512bf16::product, avx512_kernels()->grouped, avx512bf16::quantized};
  return &kernels;
}
#else
const flax_attn::Kernels* flax_attn::avx512bf16_kernels() { return nullptr; }
#endif
