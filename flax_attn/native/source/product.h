// A few rows times a matrix, as in a step of decoding: the matrix is read once, where it is and in its own type, by all
// threads together. Included once for each instruction level, inside its namespace.

constexpr int64_t PAIR = 2 * WIDTH;
constexpr int64_t STRIP = ROWS / 4;  // pairs of columns of a matrix (d_in, d_out) at a time
constexpr int64_t DOTS = ROWS / 2;   // rows of a matrix (d_out, d_in) at a time
constexpr int64_t DEPTH = 16;        // rows of a matrix (d_in, d_out) that are read side by side,
constexpr int64_t PAGE = 4096;       // this many bytes of each: memory is quickest where it is read on end
constexpr int64_t TILE = 4;          // rows of x that are multiplied at once, at most
constexpr int64_t DEEPEST = 32;      // DEPTH of a lower type for more rows of x than that, which take longer than reading

// Two vectors of numbers that lie together. Of a lower type, the first gets those at even places and the second the
// others: this takes two instructions, and keeping their order six.
struct Pair {
  Vector first, second;
  // Adds their products with a number of x to two sums.
  void add_products(const float* x, Vector& first_sums, Vector& second_sums) const {
    first_sums += *x * first;
    second_sums += *x * second;
  }
};
static inline Pair load_pair(const float* x) { return {load(x), load(x + WIDTH)}; }
template <typename T>
static inline Pair load_pair(const T* x) {
  Bits bits;
  __builtin_memcpy(&bits, x, sizeof bits);
  return {widen<T>(bits & 0xffff), widen<T>(bits >> 16)};
}
static inline void store(float* x, const Pair& y) {
  store(x, y.first);
  store(x + WIDTH, y.second);
}

// Where number i of a row of sums is where x is of 16 bits: pairs of rows of the matrix are interleaved four at a time.
static inline int64_t place_of_pairs(int64_t i) { return i / 32 * 32 + i % 8 / 4 * 16 + i % 32 / 8 * 4 + i % 4; }
// Where it is: a matrix of 16 bits is read by even and odd places.
template <typename T, typename X = float>
static inline int64_t place(int64_t i) {
  if (sizeof(X) == 2) return place_of_pairs(i);
  return sizeof(T) != 2 ? i : i / PAIR * PAIR + i % 2 * WIDTH + i % PAIR / 2;
}

// x (m, x_row apart), its numbers of type X, @ a part of the matrix.
template <typename T, typename X = float>
struct Part {
  const X* x;
  int64_t m, x_row;
  const T* matrix;
  int64_t matrix_row;
  float* sums;
  int64_t sums_row;
  int64_t ahead;  // how many numbers on it is fetched; 0 at the end, as another thread reads what follows
};

// Calls run(M, row) for M rows from `row` on, TILE at most, so that all are taken; M is known to the compiler.
template <typename Run>
static inline void by_rows(int64_t m, const Run& run) {
  int64_t row = 0;
  for (; row + TILE <= m; row += TILE) run(std::integral_constant<int, TILE>{}, row);
  for (; row + 2 <= m; row += 2) run(std::integral_constant<int, 2>{}, row);
  for (; row < m; ++row) run(std::integral_constant<int, 1>{}, row);
}

// Pair j of row r of the matrix.
template <typename T>
static inline Pair right_of(const Part<T>& part, int64_t r, int j, int64_t) {
  const T* from = part.matrix + r * part.matrix_row + j * PAIR;
  fetch<PAIR * sizeof(T)>(from + part.ahead);
  return load_pair(from);
}

template <typename T>
static inline Pair load_kept(const Part<T>&, const float* x) {
  return load_pair(x);
}

// sums (M, N pairs) += x (M, depth) @ matrix (depth, N pairs), from a row of x on; `right` is `right_of` for r and j. As
// many rows of the matrix are multiplied at once as numbers of x fill a lane. Calls of it take a tenth of its time.
template <int M, int N, typename T, typename X, typename Right>
__attribute__((always_inline)) static inline void add_products(const Part<T, X>& part, int64_t row, int64_t depth, const Right& right) {
  constexpr int64_t AT_ONCE = sizeof(float) / sizeof(X);
  Vector first[M][N], second[M][N];
  const X* x = part.x + row * part.x_row;
  float* sums = part.sums + row * part.sums_row;
  for (int i = 0; i < M; ++i) {
    for (int j = 0; j < N; ++j) {
      first[i][j] = load(sums + i * part.sums_row + j * PAIR);
      second[i][j] = load(sums + i * part.sums_row + j * PAIR + WIDTH);
    }
  }
  int64_t r = 0;
  do {
    for (int j = 0; j < N; ++j) {
      const auto own = right(r, j);
      for (int i = 0; i < M; ++i) own.add_products(x + i * part.x_row + r, first[i][j], second[i][j]);
    }
  } while ((r += AT_ONCE) < depth);
  for (int i = 0; i < M; ++i)
    for (int j = 0; j < N; ++j) store(sums + i * part.sums_row + j * PAIR, Pair{first[i][j], second[i][j]});
}

// The same for all rows of x. For more than a tile has, what the first rows widen is kept, where no row of the matrix takes
// the place of another in the nearest cache.
template <int N, typename T, typename X>
static inline void add_rows(const Part<T, X>& part, int64_t depth) {
  const auto read = [&](int64_t r, int j) { return right_of(part, r, j, depth); };
  if (part.m <= TILE)
    return by_rows(part.m, [&](auto count, int64_t row) { add_products<count, N>(part, row, depth, read); });
  float wide[DEEPEST * N * PAIR];
  add_products<TILE, N>(part, 0, depth, [&](int64_t r, int j) {
    const auto right = read(r, j);
    store(wide + (r * N + j) * PAIR, right);
    return right;
  });
  const auto kept = [&](int64_t r, int j) { return load_kept(part, wide + (r * N + j) * PAIR); };
  by_rows(part.m - TILE, [&](auto count, int64_t row) { add_products<count, N>(part, row + TILE, depth, kept); });
}

template <int N, typename T, typename X>
static inline void add_strip(Part<T, X>& part, int64_t depth) {
  add_rows<N>(part, depth);
  part.matrix += N * PAIR;
  part.sums += N * PAIR;
}

// sums (m, cols) += x (m, depth) @ matrix (depth, cols), depth at most DEEPEST; the rows of sums end with whole pairs.
template <typename T, typename X>
static void add_block(Part<T, X> part, int64_t depth, int64_t cols) {
  for (; cols >= STRIP * PAIR; cols -= STRIP * PAIR) add_strip<STRIP>(part, depth);
  for (; cols >= PAIR; cols -= PAIR) add_strip<1>(part, depth);
  if (cols == 0) return;
  T rest[DEEPEST * PAIR] = {};
  for (int64_t r = 0; r < depth; ++r) std::copy_n(part.matrix + r * part.matrix_row, cols, rest + r * PAIR);
  part.matrix = rest;
  part.matrix_row = PAIR;
  part.ahead = 0;
  add_strip<1>(part, depth);
}

// The same of any depth.
template <typename T, typename X>
static void add_blocks(Part<T, X> part, int64_t depth, int64_t cols) {
  const bool deep = part.m > TILE && sizeof(T) < sizeof(X);
  const int64_t most = deep ? DEEPEST : DEPTH;
  for (; depth > 0; depth -= most, part.x += most, part.matrix += most * part.matrix_row) {
    part.ahead = depth > most ? most * part.matrix_row : 0;
    add_block(part, std::min(most, depth), cols);
  }
}

// sums (M, R) = x (M, width) @ matrix (R, width)^T, from a row of x on.
template <int M, int R, typename T>
static inline void dot_products(const Part<T>& part, int64_t row, int64_t width) {
  Vector total[M][R] = {};
  const float* x = part.x + row * part.x_row;
  int64_t c = 0;
  for (; c + PAIR <= width; c += PAIR) {
    Pair right[R];
    for (int j = 0; j < R; ++j) {
      fetch<PAIR * sizeof(T)>(part.matrix + j * part.matrix_row + c + part.ahead);
      right[j] = load_pair(part.matrix + j * part.matrix_row + c);
    }
    for (int i = 0; i < M; ++i) {
      const Pair left = load_pair(x + i * part.x_row + c);
      for (int j = 0; j < R; ++j) {
        total[i][j] += left.first * right[j].first;
        total[i][j] += left.second * right[j].second;
      }
    }
  }
  for (int i = 0; i < M; ++i) {
    for (int j = 0; j < R; ++j) {
      float one = sum(total[i][j]);
      for (int64_t k = c; k < width; ++k) one += x[i * part.x_row + k] * read(part.matrix + j * part.matrix_row + k);
      part.sums[(row + i) * part.sums_row + j] = one;
    }
  }
}

// sums (m, rows) = x (m, width) @ matrix (rows, width)^T
template <typename T, typename X>
static void dot_block(Part<T, X> part, int64_t width, int64_t rows) {
  for (; rows >= DOTS; rows -= DOTS, part.matrix += DOTS * part.matrix_row, part.sums += DOTS)
    by_rows(part.m, [&](auto count, int64_t row) { dot_products<count, DOTS>(part, row, width); });
  for (; rows > 0; --rows, part.matrix += part.matrix_row, ++part.sums)
    by_rows(part.m, [&](auto count, int64_t row) { dot_products<count, 1>(part, row, width); });
}

// x in float32; in the order of `load_pair` where pairs of it are multiplied by pairs of the matrix.
template <typename T>
static void copy_row(const T* from, float* to, int64_t width, bool in_pairs) {
  int64_t i = 0;
  for (; i + PAIR <= width; i += PAIR)
    store(to + i, in_pairs ? load_pair(from + i) : Pair{load(from + i), load(from + i + WIDTH)});
  for (; i < width; ++i) to[i] = read(from + i);
}

// Memory for `size` numbers, which a thread keeps for its next call: new memory costs a page fault for every 4 KiB.
static float* scratch(int64_t size) {
  thread_local int64_t kept_size = 0;
  thread_local std::unique_ptr<Array<float>> kept;
  if (size > kept_size) kept = std::make_unique<Array<float>>(size);
  kept_size = std::max(size, kept_size);
  return *kept;
}

// X is the type that x is multiplied in.
template <typename Number, typename T, typename Result, typename X = float>
static void multiply_few(const MatrixProduct& p, Pool& pool) {
  // A task has a chunk of the results, and where these are few only a part of the sum.
  const int64_t tasks = 4 * (pool.threads() + 1), padded = round_up(p.d_out, PAIR);
  const int64_t page = PAGE / static_cast<int64_t>(sizeof(T));
  const int64_t cols = p.transposed ? round_up(blocks_of(p.d_out, tasks), DOTS) : page;
  const int64_t chunks = blocks_of(p.d_out, cols);
  const int64_t depth = p.transposed ? p.d_in : round_up(blocks_of(p.d_in, blocks_of(tasks, chunks)), DEPTH);
  const int64_t parts = blocks_of(p.d_in, depth);
  const int64_t x_row = round_up(p.d_in, 2);
  float* const sums = scratch(parts * p.m * padded + p.m * x_row);
  X* const x = reinterpret_cast<X*>(sums + parts * p.m * padded);
  for (int64_t i = 0; i < p.m; ++i)
    copy_row(static_cast<const Number*>(p.x) + i * p.d_in, x + i * x_row, p.d_in, p.transposed);
  parallel_for(pool, parts * chunks, p.m * p.d_in * p.d_out, [&](int, int64_t task) {
    const int64_t col = task % chunks * cols, count = std::min(cols, p.d_out - col);
    float* const to = sums + task / chunks * p.m * padded + col;
    Part<T, X> part{x, p.m, x_row, static_cast<const T*>(p.matrix), p.d_out, to, padded, 0};
    if (p.transposed) {
      part.matrix += col * p.d_in;
      part.matrix_row = p.d_in;
      part.ahead = 2 * DOTS * p.d_in;
      return dot_block(part, p.d_in, count);
    }
    for (int64_t i = 0; i < p.m; ++i) std::fill_n(part.sums + i * padded, round_up(count, PAIR), 0.0f);
    const int64_t start = task / chunks * depth;
    part.x += start;
    part.matrix += start * p.d_out + col;
    add_blocks(part, std::min(depth, p.d_in - start), count);
  });
  parallel_for(pool, p.m * chunks, parts * p.m * p.d_out, [&](int, int64_t task) {
    const int64_t i = task / chunks, col = task % chunks * cols, count = std::min(cols, p.d_out - col);
    float* total = sums + i * padded + col;
    for (int64_t part = 1; part < parts; ++part)
      for (int64_t j = 0; j < round_up(count, PAIR); ++j) total[j] += total[part * p.m * padded + j];
    Result* result = static_cast<Result*>(p.result) + i * p.d_out + col;
    for (int64_t j = 0; j < count; ++j) write(result + j, total[p.transposed ? j : place<T, X>(j)]);
  });
}
