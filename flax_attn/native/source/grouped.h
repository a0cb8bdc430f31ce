// Rows times the matrix of their group, as in a mixture of experts, and the two products that are its gradients. No matrix
// is copied but in strips. Included once for each instruction level, inside its namespace.

constexpr int64_t FEW = 8;              // rows of a group at most that the matrix is read for where it is
constexpr int64_t TASK = 128;           // columns of a matrix, of which those for many rows are copied
constexpr int64_t TERMS_AT_ONCE = 256;  // of a sum: LANES columns of them fit the first cache, beside
constexpr int64_t ROWS_AT_ONCE = 64;    // the sums of so many rows

// LANES columns of a right side (terms, LANES) from `from` on, of which `cols` are there.
template <typename T>
static void copy_columns(const T* from, int64_t step, int64_t terms, int64_t cols, float* to) {
  for (int64_t r = 0; r < terms; ++r, from += step, to += LANES)
    for (int64_t j = 0; j < LANES; j += WIDTH) store(to + j, load_or_zero(from, j, cols));
}

// The same, of a right side that lies transposed.
template <typename T>
static void copy_rows(const T* from, int64_t step, int64_t terms, int64_t cols, float* to) {
  for (int64_t r = 0; r < terms; r += WIDTH) {
    for (int64_t j = 0; j < LANES; j += WIDTH) {
      Vector block[WIDTH];
      for (int64_t i = 0; i < WIDTH; ++i) block[i] = load_or_zero(j + i < cols ? from + (j + i) * step : nullptr, r, terms);
      transpose(block);
      for (int64_t i = 0; i < std::min<int64_t>(WIDTH, terms - r); ++i) store(to + (r + i) * LANES + j, block[i]);
    }
  }
}

// One group's product left (rows, terms) @ right (terms, cols), of which a task has some columns.
template <typename T>
struct GroupProduct {
  int64_t rows, terms;
  bool left_transposed, right_transposed;
  const T* left;
  int64_t left_step;  // from a row to the next as it is stored, and so on
  const T* right;
  int64_t right_step;
  T* to;
  int64_t to_step;
};

// `memory` holds (rows, terms) in a lower type, and else nothing, and (terms, LANES).
template <typename T>
static void multiply_many(const GroupProduct<T>& p, int64_t col, int64_t last, float* memory) {
  const float* own;
  float* strip = memory;
  if constexpr (std::is_same_v<T, float>) {
    own = p.left;
  } else {
    own = memory;
    strip += p.rows * p.terms;
    for (int64_t i = 0; i < p.rows * p.terms; i += p.left_step) copy_row(p.left + i, memory + i, p.left_step, false);
  }
  const int64_t step = p.left_transposed ? 1 : p.left_step, next = p.left_transposed ? p.left_step : 1;
  alignas(64) float sums[ROWS_AT_ONCE * LANES];
  for (; col < last; col += LANES) {
    const int64_t cols = std::min<int64_t>(LANES, last - col);
    if (p.right_transposed)
      copy_rows(p.right + col * p.right_step, p.right_step, p.terms, cols, strip);
    else
      copy_columns(p.right + col, p.right_step, p.terms, cols, strip);
    for (int64_t row = 0; row < p.rows; row += ROWS_AT_ONCE) {
      const int64_t count = std::min(ROWS_AT_ONCE, p.rows - row);
      std::fill_n(sums, count * LANES, 0.0f);
      for (int64_t r = 0; r < p.terms; r += TERMS_AT_ONCE) {
        const Product part{own + row * step + r * next, step, next, strip + r * LANES, LANES, sums, LANES};
        const int64_t terms = std::min(TERMS_AT_ONCE, p.terms - r);
        p.left_transposed ? multiply<1, true>(part, count, LANES, terms) : multiply<0, true>(part, count, LANES, terms);
      }
      for (int64_t i = 0; i < count; ++i)
        for (int64_t j = 0; j < cols; j += WIDTH)
          write(p.to + (row + i) * p.to_step + col + j, load(sums + i * LANES + j), cols - j);
    }
  }
}

// The same for few rows; `memory` holds (rows, terms) and (rows, TASK).
template <typename T>
static void multiply_few_rows(const GroupProduct<T>& p, int64_t col, int64_t last, float* memory) {
  float* const sums = memory + p.rows * p.terms;
  for (int64_t i = 0; i < p.rows; ++i)
    copy_row(p.left + i * p.left_step, memory + i * p.terms, p.terms, p.right_transposed);
  Part<T> part{memory, p.rows, p.terms, p.right + col, p.right_step, sums, TASK, 0};
  if (p.right_transposed) {
    part.matrix = p.right + col * p.right_step;
    part.ahead = 2 * DOTS * p.right_step;
    dot_block(part, p.terms, last - col);
  } else {
    std::fill_n(sums, p.rows * TASK, 0.0f);
    add_blocks(part, p.terms, last - col);
  }
  for (int64_t i = 0; i < p.rows; ++i)
    for (int64_t j = 0; j < last - col; ++j)
      write(p.to + i * p.to_step + col + j, sums[i * TASK + (p.right_transposed ? j : place<T>(j))]);
}

template <typename T>
static void multiply_groups(const GroupedProduct& p, Pool& pool) {
  const bool outer = p.form == GroupedForm::outer, transposed = p.form == GroupedForm::transposed;
  const int64_t size = p.d_in * p.d_out, width = transposed ? p.d_out : p.d_in, cols = transposed ? p.d_in : p.d_out;
  const T *left = static_cast<const T*>(p.left), *right = static_cast<const T*>(p.right);
  T* const result = static_cast<T*>(p.result);
  std::vector<int64_t> starts(1, 0);
  for (int64_t g = 0; g < p.groups; ++g) starts.push_back(std::clamp<int64_t>(starts[g] + p.sizes[g], starts[g], p.m));
  if (!outer) std::memset(result + starts.back() * cols, 0, (p.m - starts.back()) * cols * sizeof(T));
  const int64_t tasks = blocks_of(cols, TASK);
  parallel_for(pool, p.groups * tasks, p.m * size, [&](int, int64_t task) {
    const int64_t g = task / tasks, start = starts[g], rows = starts[g + 1] - start;
    const int64_t col = task % tasks * TASK, last = std::min(col + TASK, cols);
    GroupProduct<T> one{rows, width, false, transposed, left + start * width, width, right + g * size, p.d_out,
                        result + start * cols, cols};
    if (outer) one = {width, rows, true, false, one.left, width, right + start * cols, cols, result + g * size, cols};
    float* const memory = scratch(one.rows * (one.terms + TASK) + one.terms * LANES);
    if (!outer && rows <= FEW) return multiply_few_rows(one, col, last, memory);
    multiply_many(one, col, last, memory);
  });
}
