// The kernels for processors with AVX2.
#include "includes.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC target("avx2,fma,f16c")

#define LEVEL avx2
#define VECTOR_BYTES 32
#define ROWS 4
#include "level.h"

const flax_attn::Kernels* flax_attn::avx2_kernels() {
  static const Kernels kernels{"avx2", avx2::forward, avx2::backward, avx2::product, avx2::grouped, avx2::quantized};
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? &kernels : nullptr;
}
#else
const flax_attn::Kernels* flax_attn::avx2_kernels() { return nullptr; }
#endif
