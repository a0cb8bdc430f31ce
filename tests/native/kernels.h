// Runs a problem through the kernels of one instruction level.
#pragma once

#include <cstring>

#include "calls.h"
#include "formula.h"

using flax_attn::Type;
#ifdef __aarch64__
using Half = __fp16;
#else
using Half = _Float16;
#endif

// An array as the kernels read it; each is memory of its own, so that a sanitizer sees a step beyond its end.
class Stored {
 public:
  Stored(const Numbers& numbers, Type type) : type_(type), bytes_(numbers.size() * width()) {
    for (size_t i = 0; i < numbers.size(); ++i) put(i, static_cast<float>(numbers[i]));
  }
  void* data() { return bytes_.data(); }
  Numbers numbers() const {
    Numbers made(bytes_.size() / width());
    for (size_t i = 0; i < made.size(); ++i) made[i] = get(i);
    return made;
  }

 private:
  size_t width() const { return type_ == Type::float32 ? 4 : 2; }
  void put(size_t i, float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    const uint16_t high = static_cast<uint16_t>(bits >> 16);
    const Half half = static_cast<Half>(x);
    const void* from = &x;
    if (type_ == Type::bfloat16) from = &high;
    if (type_ == Type::float16) from = &half;
    std::memcpy(bytes_.data() + i * width(), from, width());
  }
  double get(size_t i) const {
    uint32_t bits = 0;
    Half half;
    float x;
    const unsigned char* from = bytes_.data() + i * width();
    if (type_ == Type::float16) return std::memcpy(&half, from, 2), static_cast<double>(half);
    std::memcpy(&bits, from, width());
    if (type_ == Type::bfloat16) bits <<= 16;
    std::memcpy(&x, &bits, 4);
    return x;
  }

  Type type_;
  std::vector<unsigned char> bytes_;
};

// (b, s, k, width) as (b, k, s, width).
inline Numbers heads_first(const Numbers& from, const Problem& x, int64_t width) {
  Numbers to(from.size());
  for (int64_t i = 0; i < x.b * x.s * x.k; ++i)
    std::copy_n(&from[i * width], width, &to[((i / x.k / x.s * x.k + i % x.k) * x.s + i / x.k % x.s) * width]);
  return to;
}

struct Run {
  Numbers few, many, output, d_query, d_key, d_value, delta;
};

inline Run run(const Problem& x, Type type, bool by_heads, const flax_attn::Kernels& kernels, flax_attn::Pool& pool) {
  Stored query(x.query, type), cotangent(x.cotangent, type);
  Stored key(by_heads ? heads_first(x.key, x, x.h) : x.key, type);
  Stored value(by_heads ? heads_first(x.value, x, x.v) : x.value, type);
  Stored output(Numbers(x.cotangent.size()), type), d_query(Numbers(x.query.size()), type);
  Stored d_key(Numbers(x.key.size()), type), d_value(Numbers(x.value.size()), type);
  std::vector<float> sinks(x.sinks.begin(), x.sinks.end()), top(x.b * x.n * x.t), total(top), delta(top);
  const auto ids = [](const std::vector<int32_t>& of) { return of.empty() ? nullptr : of.data(); };
  const flax_attn::Attention call{x.b, x.t, x.s, x.n, x.k, x.h, x.v, type, by_heads, static_cast<float>(x.scale),
                                  static_cast<float>(x.soft_cap), query.data(), key.data(), value.data(),
                                  sinks.empty() ? nullptr : sinks.data(), x.start.data(), x.stop.data(),
                                  ids(x.query_segment), ids(x.key_segment),
                                  x.dense.empty() ? nullptr : x.dense.data(), x.dense_b == 1 ? x.b : 1,
                                  x.dense_n * x.dense_t * x.s, x.dense_n == 1 ? 0 : x.dense_t * x.s,
                                  x.dense_t == 1 ? 0 : x.s};
  const auto forward = [&](bool few) {
    kernels.forward({call, output.data(), top.data(), total.data(), few, false}, pool);
    return output.numbers();
  };
  const Numbers few = forward(true), many = forward(false);
  std::vector<float> unrounded(x.cotangent.size());
  kernels.forward({call, unrounded.data(), top.data(), total.data(), false, true}, pool);
  kernels.backward({call, unrounded.data(), cotangent.data(), top.data(), total.data(), d_query.data(), d_key.data(),
                    d_value.data(), delta.data(), true}, pool);
  return {few, many, Numbers(unrounded.begin(), unrounded.end()), d_query.numbers(), d_key.numbers(), d_value.numbers(), Numbers(delta.begin(), delta.end())};
}
