// The kernels for processors with AVX-512.
#include "includes.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")

#define LEVEL avx512
#define VECTOR_BYTES 64
#define ROWS 8
#include "level.h"

const flax_attn::Kernels* flax_attn::avx512_kernels() {
  static const Kernels kernels{"avx512", avx512::forward, avx512::backward, avx512::product, avx512::grouped, avx512::quantized};
  const bool supported = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  return supported ? &kernels : nullptr;
}
#else
const flax_attn::Kernels* flax_attn::avx512_kernels() { return nullptr; }
#endif
