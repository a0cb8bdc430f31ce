// Rows of bfloat16 times a matrix, on the tiles of AMX: 16 rows take hardly longer than one. Included inside the namespace of
// its level, behind `tiles.h` and `quantized_dots.h`.

// From how many rows for each matrix on it is quicker than `dots.h`, which multiplies `HEIGHT` rows at once, and converts a
// number of 8 bits as often: measured.
template <typename Code>
constexpr int64_t TILES_FROM = std::is_same<Code, BFloat16>::value || HELD_IN<Code> == 2 ? HEIGHT + 1 : 2;

// sums (m, cols) += x (m, TERMS) @ matrix (depth, cols), where x has zeros behind its depth. The columns lie in the order of
// `place_of_pairs`.
static void add_tiles(const BPart& part, int64_t depth, int64_t cols) {
  alignas(64) BFloat16 right[2][TILE];
  const int64_t stride = part.sums_row * sizeof(float);
  _tile_loadd(2, part.x, part.x_row * sizeof(BFloat16));
  for (int64_t col = 0; col < cols; col += PAIR) {
    const BFloat16* const from = part.matrix + col;
    const BFloat16* const next = from + part.ahead;
    for (int64_t i = 0; i < TERMS; i += 2) {
      const __m512i first = i < depth ? load_halves(from + i * part.matrix_row) : __m512i{};
      const __m512i second = i + 1 < depth ? load_halves(from + (i + 1) * part.matrix_row) : __m512i{};
      _mm512_store_si512(right[0] + i * SIDE, _mm512_unpacklo_epi16(first, second));
      _mm512_store_si512(right[1] + i * SIDE, _mm512_unpackhi_epi16(first, second));
    }
    // Not all at one time: a core has too few requests under way.
    for (int64_t i = 0; i < TERMS; i += 2) fetch<64>(next + i * part.matrix_row);
    float* const sums = part.sums + col;
    _tile_loadd(0, sums, stride);
    _tile_loadd(1, sums + SIDE, stride);
    _tile_loadd(3, right[0], 64);
    _tile_loadd(4, right[1], 64);
    for (int64_t i = 1; i < TERMS; i += 2) fetch<64>(next + i * part.matrix_row);
    _tile_dpbf16ps(0, 2, 3);
    _tile_dpbf16ps(1, 2, 4);
    _tile_stored(0, sums, stride);
    _tile_stored(1, sums + SIDE, stride);
  }
}

static void add_blocks(BPart part, int64_t depth, int64_t cols) {
  const TileRegisters registers(part.m);
  const int64_t whole = round_down(cols, PAIR);
  for (; depth > 0; depth -= TERMS, part.x += TERMS, part.matrix += TERMS * part.matrix_row) {
    const int64_t own = std::min(TERMS, depth);
    part.ahead = depth > TERMS ? TERMS * part.matrix_row : 0;
    add_tiles(part, own, whole);
    if (whole == cols) continue;
    BFloat16 rest[TERMS * PAIR] = {};
    for (int64_t r = 0; r < own; ++r) std::copy_n(part.matrix + r * part.matrix_row + whole, cols - whole, rest + r * PAIR);
    BPart last = part;
    last.matrix = rest, last.matrix_row = PAIR, last.sums += whole, last.ahead = 0;
    add_tiles(last, own, PAIR);
  }
}

// The next functions multiply with matrices (d_out, d_in), which are held in 16 bits or fewer: their rows are the left sides,
// and rows of x lie on the columns.

static inline __m512i bfloats(const BFloat16* x) { return load_halves(x); }

// 32 numbers of a row from number c on, zeros beyond its width.
template <typename Code>
static inline __m512i bfloats_or_zero(const Code* row, int64_t c, int64_t width) {
  if (c + TERMS <= width) return bfloats(row + c / HELD_IN<Code>);
  Code rest[TERMS / HELD_IN<Code>] = {};
  std::copy_n(row + c / HELD_IN<Code>, (width - c) / HELD_IN<Code>, rest);
  return bfloats(rest);
}

// Where a tile lies, and the bytes from a row of it to the next.
struct TileMemory {
  const void* from;
  int64_t row_bytes;
};
// Up to 16 rows of a matrix, TERMS numbers of each from number c on: where they are, or as a copy in `memory`.
template <typename Code, typename Scale>
static inline TileMemory left_tile(const HeldRows<Code, Scale>& rows, int64_t first, int64_t count, int64_t c,
                                   BFloat16* memory) {
  const int64_t width = rows.d_in / HELD_IN<Code>;
  const Code* const from = rows.row(first);
  const Code* const at = from + c / HELD_IN<Code>;
  const bool whole = count >= SIDE && c + TERMS <= rows.d_in;
  // A line of 64 bytes is fetched once: in each of its steps those of some rows.
  constexpr int64_t STEPS_OF_LINE = 64 / (TERMS / HELD_IN<Code> * sizeof(Code)), FETCHED = SIDE / STEPS_OF_LINE;
  const int64_t next = 2 * SIDE + c / TERMS % STEPS_OF_LINE * FETCHED;
  for (int64_t i = next; i < next + FETCHED; ++i) fetch<1>(at + i * width);
  if (whole && std::is_same<Code, BFloat16>::value) return {at, width * static_cast<int64_t>(sizeof(Code))};
  if (whole)
    for (int64_t i = 0; i < SIDE; ++i) _mm512_store_si512(memory + i * TERMS, bfloats(at + i * width));
  else
    for (int64_t i = 0; i < SIDE; ++i)
      _mm512_store_si512(memory + i * TERMS, i < count ? bfloats_or_zero(from + i * width, c, rows.d_in) : __m512i{});
  return {memory, TERMS * sizeof(BFloat16)};
}

// to (m, count) = x (m, d_in) @ rows (count, d_in)^T for at most 2 SIDE rows of the matrix; x lies in tiles.
template <typename Code, typename Scale, typename Result>
static inline void tile_products(const BFloat16* x, int64_t m, const HeldRows<Code, Scale>& rows, int64_t count, Result* to,
                                 int64_t to_row) {
  alignas(64) BFloat16 left[2][TILE];
  alignas(64) float part[2 * SIDE][SIDE];
  Vector total[2 * SIDE] = {};
  for (int64_t block = 0; block * rows.block_in < rows.d_in; ++block) {
    const int64_t end = std::min(rows.d_in, (block + 1) * rows.block_in);
    _tile_zero(0);
    _tile_zero(1);
    for (int64_t c = block * rows.block_in; c < end; c += TERMS) {
      _tile_loadd(4, x + c * SIDE, 64);
      const TileMemory first = left_tile(rows, 0, count, c, left[0]);
      _tile_loadd(2, first.from, first.row_bytes);
      _tile_dpbf16ps(0, 2, 4);
      if (count <= SIDE) continue;
      const TileMemory second = left_tile(rows, SIDE, count - SIDE, c, left[1]);
      _tile_loadd(3, second.from, second.row_bytes);
      _tile_dpbf16ps(1, 3, 4);
    }
    _tile_stored(0, part[0], 64);
    _tile_stored(1, part[SIDE], 64);
    for (int64_t i = 0; i < count; ++i) total[i] += load(part[i]) * read(rows.scales_of(i) + block);
  }
  for (int64_t j = 0; j < count; j += SIDE) {
    transpose(total + j);
    for (int64_t i = 0; i < m; ++i) write(to + i * to_row + j, total[j + i], count - j);
  }
}

// Rows of x in tiles of two numbers of 16 rows, with zeros beyond both.
static void put_right(const BFloat16* x, int64_t m, int64_t width, BFloat16* to) {
  const BFloat16* rows[SIDE] = {};
  for (int64_t i = 0; i < m; ++i) rows[i] = x + i * width;
  for_pair_columns(rows, width, round_up(width, TERMS) / 2, [&](int64_t pair, Ints lanes) {
    _mm512_storeu_si512(to + pair * TERMS, (__m512i)lanes);
  });
}

template <typename Code, typename Scale, typename Result>
static void multiply_in_tiles(const QuantizedProduct& p, Result* result, Pool& pool) {
  struct Rows {  // of x, and of one group
    int64_t group, first, count;
  };
  std::vector<Rows> parts;
  int64_t start = 0;
  for (int64_t g = 0; g < p.groups; ++g) {
    const int64_t end = p.sizes ? std::clamp<int64_t>(start + p.sizes[g], start, p.m) : p.m;
    for (; start < end; start += parts.back().count) parts.push_back({g, start, std::min(SIDE, end - start)});
  }
  std::fill_n(result + start * p.d_out, (p.m - start) * p.d_out, Result{});
  if (parts.empty()) return;
  const int64_t size = round_up(p.d_in, TERMS) * SIDE, of_parts = parts.size();
  BFloat16* const right = reinterpret_cast<BFloat16*>(scratch(of_parts * size / 2));
  parallel_for(pool, of_parts, p.m * p.d_in, [&](int, int64_t i) {
    put_right(static_cast<const BFloat16*>(p.x) + parts[i].first * p.d_in, parts[i].count, p.d_in, right + i * size);
  });
  const int64_t columns = round_up(blocks_of(p.d_out, 4 * (pool.threads() + 1)), 2 * SIDE);
  const int64_t chunks = blocks_of(p.d_out, columns);
  const int64_t scales = blocks_of(p.d_out, p.block_out) * blocks_of(p.d_in, p.block_in);
  parallel_for(pool, of_parts * chunks, p.m * p.d_in * p.d_out, [&](int, int64_t task) {
    const TileRegisters registers;
    const Rows& part = parts[task / chunks];
    HeldRows<Code, Scale> rows{static_cast<const Code*>(p.matrix) + part.group * p.d_out * (p.d_in / HELD_IN<Code>),
                               static_cast<const Scale*>(p.scale) + part.group * scales, task % chunks * columns, p.d_in,
                               p.block_out, p.block_in};
    const int64_t end = std::min(p.d_out, rows.first + columns);
    for (; rows.first < end; rows.first += 2 * SIDE) {
      Result* const to = result + part.first * p.d_out + rows.first;
      tile_products(right + task / chunks * size, part.count, rows, std::min(2 * SIDE, end - rows.first), to, p.d_out);
    }
  });
}
