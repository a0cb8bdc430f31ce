// The arguments of the kernels, and the kernels of each instruction level.
//
// Sizes of attention are those of the Python side: b batch, t queries, s keys, n query heads, k key/value heads, h head width, v value
// width. Arrays are row-major. Scores are kept to base 2: x = log2(e) * scale * q.k, so that a weight is exp2(x - top).
#pragma once

#include <cstdint>

#include "parallel.h"

namespace flax_attn {

enum class Type { float32, bfloat16, float16 };

struct Attention {
  int64_t b, t, s, n, k, h, v;
  Type type;         // of query, key, value and their gradients
  bool heads_first;  // key and value are (b, k, s, h) instead of (b, s, k, h)
  float scale;
  float soft_cap;  // 0 is none
  const void *query, *key, *value;
  const float* sinks;           // (b, n), or null
  const int32_t *start, *stop;  // (b, t): query i may see the keys start[i] <= j < stop[i]
  const int32_t *query_segment, *key_segment;  // (b, t) and (b, s), or null: and those of its own segment
  const uint8_t* dense;  // (b / dense_rows, 1 or n, 1 or t, s), or null: and those where it is not 0
  int64_t dense_rows;    // of the batch that share an array
  int64_t dense_row, dense_head, dense_query;  // from one to the next; 0 where one serves all
  int64_t group() const { return n / k; }
  const uint8_t* dense_keys(int64_t row, int64_t head, int64_t query) const {
    return dense + row / dense_rows * dense_row + head * dense_head + query * dense_query;
  }
};

// Every score is summed in the same order in `forward` as in `backward`, except with `few`: large scores would else differ
// by more than their exponentials may. So a call that is differentiated is never one of few queries.
struct Forward : Attention {
  void* output;       // (b, t, n, v)
  float *top, *total;  // (b, n, t): the largest score, and the sum of exp2(x - top); the sum is NaN where the row is
  bool few;            // read keys and values where they are
  bool wide;  // the output is float32, whatever the type; not with `few`
};

// With a delta of outputs that are rounded, the gradients of the scores of a row do not add up to 0.
struct Backward : Attention {
  const void *output, *cotangent;  // (b, t, n, v)
  const float *top, *total;
  void *d_query, *d_key, *d_value;  // tokens first
  float* delta;                     // (b, n, t): the sum of cotangent * output
  bool wide;                        // the output is float32, whatever the type
};

// result (m, d_out) = x (m, d_in) @ matrix
struct MatrixProduct {
  int64_t m, d_in, d_out;
  Type type;         // of x and of the matrix
  Type result_type;  // the same, or float32
  bool transposed;   // the matrix is (d_out, d_in) instead of (d_in, d_out)
  const void *x, *matrix;
  void* result;
};

// Rows lie in the order of their groups; those behind the last group give zeros.
enum class GroupedForm : int64_t {
  plain,       // left (m, d_in) @ right (groups, d_in, d_out): (m, d_out)
  transposed,  // left (m, d_out) @ right (groups, d_in, d_out)^T: (m, d_in)
  outer        // left (m, d_in)^T @ right (m, d_out), of each group its own: (groups, d_in, d_out)
};
struct GroupedProduct {
  int64_t m, groups, d_in, d_out;
  Type type;  // of all but the sizes
  GroupedForm form;
  const void *left, *right;
  const int32_t* sizes;  // (groups): how many rows each has
  void* result;
};

// result (m, d_out) = x (m, d_in) @ matrix^T, of each group its own rows as in `GroupedProduct`. A block of (block_out,
// block_in) numbers of a matrix has one scale; block_in is a multiple of 32, or all.
enum class Codes { int8, e4m3, e2m1 };
struct QuantizedProduct {
  int64_t m, groups, d_in, d_out, block_out, block_in;
  Type type;  // of x
  Codes codes;
  const void* x;
  const void* matrix;    // (groups, d_out, d_in), of e2m1 two numbers in a byte
  const void *scale;     // (groups, d_out / block_out, d_in / block_in), rounded up: float32, or beside e2m1 exponents
  const int32_t* sizes;  // (groups): how many rows each has; null where all are those of one
  float* result;
};

struct Kernels {
  const char* name;
  void (*forward)(const Forward&, Pool&);
  void (*backward)(const Backward&, Pool&);
  void (*product)(const MatrixProduct&, Pool&);
  void (*grouped)(const GroupedProduct&, Pool&);
  void (*quantized)(const QuantizedProduct&, Pool&);
};

// The kernels compiled for one instruction level; null where the compiler or the processor does not have it.
const Kernels* amx_kernels();
const Kernels* avx512bf16_kernels();
const Kernels* avx512_kernels();
const Kernels* avx2_kernels();
const Kernels* baseline_kernels();

}  // namespace flax_attn
