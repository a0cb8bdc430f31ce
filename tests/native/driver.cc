// Runs the kernels of one instruction level against the formula in double precision, from several threads and beside
// numbers that are not finite. Prints what fails and how; the exit status says whether anything did.
//
//     driver LEVEL [light]    light: threads above all, for the thread sanitizer

#include <cfloat>
#include <cstdio>
#include <string>

#ifdef __SSE2__
#include <immintrin.h>
#endif

#include "held.h"
#include "kernels.h"
#include "pools.h"
#include "problems.h"

#ifndef KERNELS  // of the levels that are linked
#define KERNELS \
  flax_attn::amx_kernels(), flax_attn::avx512bf16_kernels(), flax_attn::avx512_kernels(), flax_attn::avx2_kernels(), flax_attn::baseline_kernels()
#endif

using flax_attn::Kernels;

static int failures = 0;
constexpr double FORWARD = 2, GRADIENT = 3;  // LOW_FORWARD and LOW_GRADIENT of tolerance.py
constexpr double REORDERED = 64, NULL_DIRECTION = 1e-13;
constexpr int DRAWS = 4;

static void fail(const Problem& x, const char* what, const char* array, double amount) {
  std::printf("%s: %s is off by %.3g of what is allowed; b=%ld t=%ld s=%ld n=%ld k=%ld h=%ld v=%ld cap=%g%s%s%s\n", what,
              array, amount, x.b, x.t, x.s, x.n, x.k, x.h, x.v, x.soft_cap, x.sinks.empty() ? "" : " sinks",
              x.query_segment.empty() ? "" : " segments", x.dense.empty() ? "" : " dense");
  ++failures;
}

static double eps_of(Type type) {
  return type == Type::float32 ? FLT_EPSILON : type == Type::bfloat16 ? 0x1p-7 : 0x1p-10;
}

static double largest_of(const Numbers& x) {  // NaN where there is one
  double most = 0;
  for (double one : x) most = std::isnan(one) || std::abs(one) > most ? std::abs(one) : most;
  return most;
}

// The error over the allowed one by the rule of `lower_dtype` in flax_attn/parity/tolerance.py: `factor` times that of the
// formula in float32, the largest of several draws of how its inputs are rounded, and one rounding of the result; in
// maximum and mean.
static double excess(const Numbers& ours, const std::vector<Numbers>& draws, const Numbers& exact, Type type,
                     double factor) {
  const double eps = eps_of(type);
  const double count = static_cast<double>(exact.size());
  const auto errors = [&](const Numbers& found, bool round) {
    double most = 0, sum = 0;
    for (size_t i = 0; i < exact.size(); ++i) {
      if (std::isnan(exact[i]) != std::isnan(found[i])) return std::pair<double, double>(INFINITY, INFINITY);
      if (std::isnan(exact[i])) continue;
      const double error = std::abs((round ? rounded(found[i], type) : found[i]) - exact[i]);
      most = std::max(most, error), sum += error;
    }
    return std::pair<double, double>(most, sum / count);
  };
  const auto [most, mean] = errors(ours, false);
  double allowed_most = 0, allowed_mean = 0, size_most = 0, size_mean = 0;
  for (const Numbers& draw : draws) {
    const auto [other_most, other_mean] = errors(draw, true);
    allowed_most = std::max(allowed_most, other_most), allowed_mean = std::max(allowed_mean, other_mean);
  }
  for (double x : exact)
    if (!std::isnan(x)) size_most = std::max(size_most, std::abs(x)), size_mean += std::abs(x) / count;
  return std::max(most / std::max(factor * allowed_most + eps * size_most, DBL_MIN),
                  mean / std::max(factor * allowed_mean + eps * size_mean, DBL_MIN));
}

// `gradients`: whether these are compared too.
static void compare(const char* what, const Problem& x, Type type, bool by_heads, const Kernels& kernels,
                    flax_attn::Pool& pool, bool gradients = true) {
  const Answer exact = formula<double>(x);
  std::mt19937 coin(1);
  std::vector<Answer> draws{formula<float>(rounded(x, type))};
  for (int i = 1; i < DRAWS; ++i) draws.push_back(formula<float>(rounded(x, type, &coin)));
  const Run ours = run(rounded(x, type), type, by_heads, kernels, pool);
  const double largest = std::max({largest_of(exact.d_query), largest_of(exact.d_key), largest_of(exact.d_value)});
  const auto check = [&](const char* name, const Numbers& found, Numbers Answer::*array, double factor) {
    if (array != &Answer::output && largest_of(exact.*array) <= NULL_DIRECTION * largest) {  // rounding only
      const double amount = largest_of(found) / std::max(REORDERED * eps_of(type) * largest, DBL_MIN);
      if (!(amount <= 1)) fail(x, what, name, amount);
      return;
    }
    std::vector<Numbers> others;
    for (const Answer& draw : draws) others.push_back(draw.*array);
    const double amount = excess(found, others, exact.*array, type, factor);
    if (!(amount <= 1)) fail(x, what, name, amount);
  };
  check("output", ours.output, &Answer::output, FORWARD);
  check("output by few", ours.few, &Answer::output, FORWARD);
  check("output by many", ours.many, &Answer::output, FORWARD);
  if (!gradients) return;
  check("d_query", ours.d_query, &Answer::d_query, GRADIENT);
  check("d_key", ours.d_key, &Answer::d_key, GRADIENT);
  check("d_value", ours.d_value, &Answer::d_value, GRADIENT);
}

static const Type TYPES[] = {Type::float32, Type::float32, Type::bfloat16, Type::float16};

static void sizes(const Kernels& kernels) {
  Threads pool(3);
  Draw draw(7);
  int count = 0;
  for (int64_t t : QUERY_SIZES)
    for (size_t i = 0; i < KEY_SIZES.size(); i += 2, ++count)
      compare("sizes", draw_problem(draw, t, KEY_SIZES[i + count % 2]), TYPES[count / 2 % 4], draw.below(2), kernels,
              pool);
}

// Numbers that are not finite or huge, in hidden tokens and in tokens that some rows see: these rows are NaN, and
// what is found for all others is what it is without them.
static void not_finite(const Kernels& kernels) {
  Threads pool(2);
  for (double number : {double(NAN), double(INFINITY), -double(INFINITY), double(FLT_MAX)})
    for (int64_t t : {5, 40})
      for (int seen = 0; seen < (std::isfinite(number) ? 1 : 2); ++seen)
        for (int array = 0; array < 3; ++array) {
          Draw draw(static_cast<unsigned>(t + array));
          Problem x = draw_problem(draw, t, 70);
          x.scale = 1.5;  // such that FLT_MAX times it overflows
          for (double& one : x.query) one /= 10;
          x.soft_cap = 0, x.query_segment.clear(), x.key_segment.clear(), x.dense.clear();
          for (int64_t i = 0; i < x.b * t; ++i) {  // causal; the last two queries see nothing, the last keys nobody
            x.start[i] = 0;
            x.stop[i] = i % t < t - 2 ? static_cast<int32_t>(std::min<int64_t>(i % t + 1, 60)) : 0;
          }
          const int64_t token = seen ? 3 : array == 0 ? t - 1 : 65;
          Numbers& spoilt = array == 0 ? x.query : array == 1 ? x.key : x.value;
          spoilt[array == 0 ? x.q_at(0, token, 0, x.h) : x.k_at(0, token, 0, array == 1 ? x.h : x.v)] = number;
          // The gradients of what such a row reads are NaN or 0.
          compare(seen ? "not finite, seen" : "not finite, hidden", x, Type::float32, draw.below(2), kernels, pool, !seen);
        }
}

// Rows and widths below and above the tiles, the steps and what is widened at once; blocks of one step and of several.
static void held(const Kernels& kernels) {
  Threads pool(2);
  Draw draw(17);
  const auto check = [&](const flax_attn::QuantizedProduct& of, const std::vector<int32_t>& groups, Type type) {
    const HeldProblem x{of.m, of.d_in, of.d_out, of.block_out, of.block_in, of.codes, groups};
    const double amount = held_excess(draw, x, type, kernels, pool);
    if (amount <= 1) return;
    std::printf("held: codes %d, m=%ld d_in=%ld d_out=%ld block=(%ld, %ld), %zu groups: off by %.3g of what is allowed\n",
                static_cast<int>(x.codes), x.m, x.d_in, x.d_out, x.block_out, x.block_in, groups.size(), amount);
    ++failures;
  };
  for (Type type : {Type::float32, Type::bfloat16, Type::float16})
    for (Codes codes : {Codes::int8, Codes::e4m3, Codes::e2m1})
      for (int64_t block_in : {32, 128, 1000})
        for (int64_t m : {1, 4, 7, 8, 15, 16, 27}) {
          flax_attn::QuantizedProduct x{};
          x.m = m, x.d_out = 1 + draw.below(20), x.block_out = 1 + draw.below(3), x.block_in = block_in, x.codes = codes;
          x.d_in = codes == Codes::e2m1 ? 32 * (1 + draw.below(20)) : 1 + draw.below(600);
          check(x, {}, type);
          const int32_t first = static_cast<int32_t>(draw.below(m + 1));
          check(x, {first, 0, static_cast<int32_t>((m - first) / 2)}, type);
        }
}

// A softmax that is nearly a hard choice: forward and backward must agree on every score to the bit.
static void large_scores(const Kernels& kernels) {
  Threads pool(2);
  Draw draw(5);
  for (int64_t t : {5, 16, 40, 140}) {
    Problem x = draw_problem(draw, t, 150);
    x.scale = 10, x.soft_cap = 0;
    compare("large scores", x, Type::float32, false, kernels, pool);
  }
}

// The same bits from 8 threads at once as from one.
static void at_once(const Kernels& kernels) {
  Threads pool(3);
  Draw draw(11);
  std::vector<Problem> problems;
  std::vector<Run> alone;
  for (int64_t i = 0; i < 16; ++i)
    problems.push_back(rounded(draw_problem(draw, i % 3 ? 20 + 7 * i : 1 + i % 5, 90 + i), TYPES[i % 4]));
  for (size_t i = 0; i < 16; ++i) alone.push_back(run(problems[i], TYPES[i % 4], i % 2, kernels, pool));
  std::vector<std::thread> callers;
  std::vector<Run> together(16);
  for (size_t caller = 0; caller < 8; ++caller)
    callers.emplace_back([&, caller] {
      for (size_t i = caller; i < 16; i += 8) together[i] = run(problems[i], TYPES[i % 4], i % 2, kernels, pool);
    });
  for (std::thread& caller : callers) caller.join();
  for (size_t i = 0; i < 16; ++i)
    if (together[i].output != alone[i].output || together[i].many != alone[i].many || together[i].d_query != alone[i].d_query ||
        together[i].d_key != alone[i].d_key || together[i].d_value != alone[i].d_value)
      fail(problems[i], "16 calls at once", "a result", INFINITY);
}

// A pool whose threads never come, or are all busy with calls of their own, costs speed and never a deadlock.
static void busy_pools(const Kernels& kernels) {
  constexpr int64_t MUCH = 1 << 30;
  Draw draw(13);
  const Problem x = draw_problem(draw, 129, 129);
  Idle idle;
  compare("no threads", x, Type::float32, false, kernels, idle);
  std::atomic<int64_t> done{0};
  flax_attn::parallel_for(idle, 9, MUCH, [&](int, int64_t) { ++done; });
  if (idle.late() == 0 || done != 9) fail(x, "late threads", "parallel_for", static_cast<double>(done));
  Threads pool(2);
  flax_attn::parallel_for(pool, 8, MUCH, [&](int, int64_t) {
    flax_attn::parallel_for(pool, 5, MUCH, [&](int, int64_t) { ++done; });
  });
  if (done != 9 + 40) fail(x, "nested calls", "parallel_for", static_cast<double>(done));
}

// Each number below `count` once, and no worker twice at a time.
static void workers() {
  Threads pool(3);
  std::vector<int64_t> busy(4), seen(5000);
  flax_attn::parallel_for(pool, 5000, int64_t{1} << 30, [&](int worker, int64_t i) {
    ++busy.at(worker);  // a race here is seen by the thread sanitizer
    ++seen.at(i);
  });
  if (std::count(seen.begin(), seen.end(), 1) != 5000) fail({}, "workers", "tasks", INFINITY);
  flax_attn::parallel_for(pool, 0, 0, [](int, int64_t) { std::abort(); });
}

// As XLA sets its threads; threads that are made later inherit it.
static void flush_subnormals() {
#ifdef __SSE2__
  _mm_setcsr(_mm_getcsr() | 0x8040);
#endif
}

int main(int argc, char** argv) {
  flush_subnormals();
  const std::string level = argc > 1 ? argv[1] : "";
  const bool light = argc > 2 && std::string(argv[2]) == "light";
  for (const Kernels* kernels : {KERNELS}) {
    if (!kernels || level != kernels->name) continue;
    workers();
    busy_pools(*kernels);
    at_once(*kernels);
    if (!light) sizes(*kernels), held(*kernels), not_finite(*kernels), large_scores(*kernels);
    std::printf("%s: %d failures\n", kernels->name, failures);
    return failures > 0;
  }
  std::printf("this processor has no level \"%s\"\n", level.c_str());
  return 2;
}
