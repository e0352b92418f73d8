#version 450
#extension GL_GOOGLE_include_directive : enable
// Layer norm, RMS norm and group norm: out = EPILOGUE((x - mean) * rstd * weight + bias, row, col),
// in float.
//
// Buffers: x, weight (if HAS_WEIGHT), bias (if HAS_BIAS), out, blocks (if BLOCKS), mean and rstd (if
// STATS; with RMS only rstd), cos and sin (if TURNED), index (if TURNED 2), and what EXTRA_BUFFERS
// declares.
// Offsets and strides are in elements. Parameters from number 15 on are free for EXTRA_BUFFERS, unless
// TURNED is 2.
// Macros:
//   T_X, T_W, T_OUT, T_STATS  element types, those of elements.glslh; T_W is that of weight and bias
//   T_ANGLE                   the same of cos and sin
//   FROM_X(v), FROM_W(v)      convert an element to float
//   TO_OUT(v), TO_STATS(v)    convert float to an element
//   TO_OUT4(v)                the same for a vec4
//   HAS_WEIGHT  1: there is a weight
//   HAS_BIAS    1: there is a bias
//   STATS       1: mean and rstd are stored
//   TEXEL_X     1: x is a uniform texel buffer (rows.glslh)
//   TEXEL_W     1: weight and bias are uniform texel buffers. With GROUP 1 a texel is one element,
//               even if VEC4
//   RMS         1: the mean is not subtracted
//   GROUP       0: weight and bias are indexed by column
//               1: group norm of [N, C, H * W]. row = n * groups + group; columns are channels of a
//                  group * H * W; weight and bias are indexed by channel
//               2: the same of [N, H * W, C] (NHWC); x and out are dense
//   NESTED      1: row r of x starts at r / x_inner * x_row + r % x_inner * x_inner_row, not at
//               r * x_row. With GROUP 0
//   BLOCKS      1: the result is stored in the order of fragments (fragment_blocks.glslh), in the buffer
//               blocks behind out; 2: there alone, and there is no out. With GROUP 0; columns are a
//               multiple of 16
//   TURNED      1: rows are heads [B, S, H] of even length, and rotate after the norm: element i and the
//               one half a row behind it by the angles i of a position, with the cosines
//               cos[S, columns] and the sines sin[S, columns]. Without STATS, BLOCKS and EPILOGUE, with
//               GROUP 0; with VEC4, half a row and the offsets of cos and sin are multiples of 4
//               2: position s is stored as position index[s] of out, which has out_positions; head h
//               of it starts at b * out_batch + index[s] * out_position + h * out_row
//   INDEX_WORDS 2: index is int64, and its low words are read
//   EPILOGUE(v, row, col)   what is stored
//   EPILOGUE4(v, row, col)  the same for the vec4 of the columns col .. col + 3
//   ROW_PER_SUBGROUP, ROW_PER_INVOCATION, SUBGROUP, LOCAL  rows.glslh, which also has the grid
//   VEC4        1: x and out are read and written as vec4, and (unless GROUP 1) weight and bias.
//               Columns, row strides and offsets are multiples of 4. So are H * W (GROUP 1), or the
//               channels of a group and all channels (GROUP 2)
//   CACHE       n > 0: a row is read once, and kept in registers, n elements (vec4s if VEC4) per
//               invocation. Columns are at most n * invocations of a row (* 4 if VEC4).
//               0: rows of any length, read three times (RMS: twice)
//   TOGETHER    2: rows r and r + 8 of each 16 are normalized together, and stored in blocks 16 bytes at
//               a time. ROW_FIRST and ROW_STEP count such pairs, 8 for each 16 rows or part of them.
//               With BLOCKS, CACHE, VEC4 and a T_OUT of 16 bits; blocks has whole blocks. (1)
//   AHEAD       if CACHE 0: elements (vec4s if VEC4) that an invocation reads before it uses the
//               first of them; default 1
#include "core/rows.glslh"
#include "core/elements.glslh"

#ifndef T_W
#define T_W float
#endif
#ifndef TEXEL_W
#define TEXEL_W 0
#endif
#ifndef T_OUT
#define T_OUT float
#endif
#ifndef T_STATS
#define T_STATS float
#endif
#ifndef T_ANGLE
#define T_ANGLE float
#endif
#ifndef FROM_X
#define FROM_X(v) FLOAT_OF(T_X, v)
#endif
#ifndef FROM_W
#define FROM_W(v) FLOAT_OF(T_W, v)
#endif
#ifndef TO_OUT
#define TO_OUT(v) ELEMENT_OF(T_OUT, v)
#endif
#ifndef TO_OUT4
#define TO_OUT4(v) QUAD_FROM(T_OUT, v)
#endif
#ifndef TO_STATS
#define TO_STATS(v) ELEMENT_OF(T_STATS, v)
#endif
#ifndef HAS_WEIGHT
#define HAS_WEIGHT 0
#endif
#ifndef HAS_BIAS
#define HAS_BIAS 0
#endif
#ifndef STATS
#define STATS 0
#endif
#ifndef RMS
#define RMS 0
#endif
#ifndef GROUP
#define GROUP 0
#endif
#ifndef NESTED
#define NESTED 0
#endif
#ifndef TURNED
#define TURNED 0
#endif
#ifndef INDEX_WORDS
#define INDEX_WORDS 1
#endif
#ifndef EPILOGUE
#define EPILOGUE(v, row, col) (v)
#endif
#ifndef EPILOGUE4
#define EPILOGUE4(v, row, col)                                                                         \
    vec4(EPILOGUE(v.x, row, (col)), EPILOGUE(v.y, row, (col + 1)), EPILOGUE(v.z, row, (col + 2)), \
         EPILOGUE(v.w, row, (col + 3)))
#endif
#ifndef EXTRA_BUFFERS
#define EXTRA_BUFFERS
#endif
#ifndef BLOCKS
#define BLOCKS 0
#endif
#if BLOCKS
#include "matmul/fragment_blocks.glslh"
#endif
#ifndef CACHE
#define CACHE 0
#endif
#ifndef AHEAD
#define AHEAD 1
#endif
#ifndef TOGETHER
#define TOGETHER 1
#endif

PARAM(0, x_offset)
PARAM(1, out_offset)
PARAM(2, rows)
PARAM(3, columns)  // elements normalized together
#if GROUP != 2
PARAM(4, x_row)  // strides of a row
PARAM(5, out_row)
#endif
PARAM(6, eps_bits)  // of a float
#if HAS_WEIGHT
PARAM(7, weight_offset)
#endif
#if HAS_BIAS
PARAM(8, bias_offset)
#endif
#if STATS
#if !RMS
PARAM(9, mean_offset)
#endif
PARAM(10, rstd_offset)
#endif
#if TURNED
PARAM(9, heads)  // rows of a position
PARAM(10, positions)
PARAM(13, cos_offset)
PARAM(14, sin_offset)
#endif
#if TURNED == 2
PARAM(15, out_positions)
PARAM(16, out_batch)
PARAM(17, out_position)
PARAM(18, index_offset)
#endif
#if BLOCKS
PARAM(14, blocks_offset)
#endif
#if NESTED
PARAM(11, x_inner)
PARAM(12, x_inner_row)
#endif
#if GROUP
PARAM(11, group_channels)  // of one group
PARAM(12, area)  // H * W
PARAM(13, groups)
#endif

#define OUT_BINDING (1 + HAS_WEIGHT + HAS_BIAS)
#define BLOCKS_BINDING (OUT_BINDING + BLOCKS % 2)
#define STATS_BINDING (OUT_BINDING + 1 + BLOCKS % 2)
#define ANGLES_BINDING STATS_BINDING
#define EXTRA_BINDING (STATS_BINDING + STATS * (2 - RMS))
#if VEC4
#define V vec4
#define EACH 4
#define SUM(v) (((v).x + (v).y) + ((v).z + (v).w))
#define ELEMENT(T) QUAD_OF(T)
#define TO_V(FROM, v) vec4(FROM((v).x), FROM((v).y), FROM((v).z), FROM((v).w))
#else
#define V float
#define EACH 1
#define SUM(v) (v)
#define ELEMENT(T) T
#define TO_V(FROM, v) FROM(v)
#endif

// Weight and bias, of the column(s) from i on.
#if TEXEL_W && VEC4 && GROUP != 1
#define READ_W(name, i) texelFetch(name, (i) >> 2)
#elif TEXEL_W
#define READ_W(name, i) V(texelFetch(name, i).x)
#elif VEC4 && GROUP != 1
#define ELEMENT_W VEC4_OF(T_W)
#define READ_W(name, i) TO_V(FROM_W, WIDE4_OF(T_W)(name[(i) >> 2]))
#else
#define ELEMENT_W T_W
#define READ_W(name, i) V(FROM_W(name[i]))
#endif
#if HAS_WEIGHT && TEXEL_W
TEXEL_BUFFER(1, weight)
#elif HAS_WEIGHT
READONLY_BUFFER(1, weight, ELEMENT_W)
#endif
#if HAS_BIAS && TEXEL_W
TEXEL_BUFFER(1 + HAS_WEIGHT, bias)
#elif HAS_BIAS
READONLY_BUFFER(1 + HAS_WEIGHT, bias, ELEMENT_W)
#endif
#if BLOCKS != 2
BUFFER(OUT_BINDING, out, ELEMENT(T_OUT))
#endif
#if BLOCKS && TOGETHER == 2
WRITEONLY_BUFFER(BLOCKS_BINDING, blocks, uvec4)
#elif BLOCKS
WRITEONLY_BUFFER(BLOCKS_BINDING, blocks, ELEMENT(T_OUT))
#endif
#if STATS
#if !RMS
BUFFER(STATS_BINDING, mean, T_STATS)
#endif
BUFFER(STATS_BINDING + 1 - RMS, rstd, T_STATS)
#endif
#if TURNED
#define FROM_ANGLE(v) FLOAT_OF(T_ANGLE, v)
#if VEC4
#define ELEMENT_ANGLE VEC4_OF(T_ANGLE)
#define READ_ANGLE(name, i) TO_V(FROM_ANGLE, WIDE4_OF(T_ANGLE)(name[(i) >> 2]))
#else
#define ELEMENT_ANGLE T_ANGLE
#define READ_ANGLE(name, i) FROM_ANGLE(name[i])
#endif
READONLY_BUFFER(ANGLES_BINDING, cos, ELEMENT_ANGLE)
READONLY_BUFFER(ANGLES_BINDING + 1, sin, ELEMENT_ANGLE)
#endif
#if TURNED == 2
READONLY_BUFFER(ANGLES_BINDING + 2, index, int)
#endif
// The offset of a row's first element from the first element of x.
int row_start(int row) {
#if GROUP == 2
    return row / groups * (groups * group_channels * area) + row % groups * group_channels;
#else
    return row * columns;
#endif
}

// The offset of column col from the row's first element.
int offset_in_row(int col) {
#if GROUP == 2
    int pixel = col / group_channels;
    return pixel * (groups * group_channels) + (col - pixel * group_channels);
#else
    return col;
#endif
}

int channel(int row, int col) {
#if GROUP == 1
    return row % groups * group_channels + col / area;
#elif GROUP == 2
    return row % groups * group_channels + col % group_channels;
#else
    return col;
#endif
}

EXTRA_BUFFERS

// A number for each row that is normalized together with another.
#if TOGETHER == 2
#define PER_ROW vec2
#define OF_ROW(numbers, r) (numbers)[r]
#else
#define PER_ROW float
#define OF_ROW(numbers, r) (numbers)
#endif
#if SUBGROUP || ROW_PER_SUBGROUP
PER_ROW shuffle_xor(PER_ROW v, uint d) { return subgroupShuffleXor(v, d); }
#endif
PER_ROW add(PER_ROW a, PER_ROW b) { return a + b; }
DEFINE_JOIN(PER_ROW, sum_all, add)

V load(int base, int col) {
#if VEC4
    X4 v = READ4_X(base + offset_in_row(col));
    return TO_V(FROM_X, v);
#else
    return FROM_X(READ_X(base + offset_in_row(col)));
#endif
}

// The row's first element. What is summed is the distance from it, so that the sum keeps the digits of
// numbers that are far from 0.
float pivot_of(int base) {
#if VEC4
    return FROM_X(READ4_X(base).x);
#else
    return FROM_X(READ_X(base));
#endif
}

// A normalized element times its weight, plus its bias.
V scaled(V v, int row, int col) {
    int c = channel(row, col);
#if HAS_WEIGHT
    v *= READ_W(buf_weight, weight_offset + c);
#endif
#if HAS_BIAS
    v += READ_W(buf_bias, bias_offset + c);
#endif
    return v;
}

// What is left of a mean when it is rounded to a float; `mean` is the distance from the pivot.
PER_ROW mean_rest(PER_ROW pivot, PER_ROW mean) {
    precise PER_ROW rounded = pivot + mean;
    precise PER_ROW rest = (pivot - rounded) + mean;
    return rest;
}

// What is stored of a normalized element. `base`, `mean` and `rstd` are those of its row.
V finished(V v, int row, int col, int base, float mean, float rstd) {
    v = scaled(v, row, col);
#if TURNED
    int half_row = columns / 2;
    bool first = col < half_row;
    int other = first ? col + half_row : col - half_row;
    V partner = scaled((load(base, other) - mean) * rstd, row, other);
    int angle = row / heads % positions * columns + col;
    v = v * READ_ANGLE(buf_cos, cos_offset + angle) +
        (first ? -partner : partner) * READ_ANGLE(buf_sin, sin_offset + angle);
#endif
#if VEC4
    return EPILOGUE4(v, row, col);
#define UNIT(i) ((i) >> 2)
#define STORED(v) TO_OUT4(v)
#else
    return EPILOGUE(v, row, col);
#define UNIT(i) (i)
#define STORED(v) TO_OUT(v)
#endif
}

// The first element of a row in x, or in out.
int base_of_x(int row) {
#if GROUP == 2
    return x_offset + row_start(row);
#elif NESTED
    int outer = row / x_inner;
    return x_offset + outer * x_row + (row - outer * x_inner) * x_inner_row;
#else
    return x_offset + row * x_row;
#endif
}

int base_of_out(int row) {
#if GROUP == 2
    return out_offset + row_start(row);
#elif TURNED == 2
    int token = row / heads, batch = token / positions, position = token - batch * positions;
    int to = buf_index[(index_offset + position) * INDEX_WORDS];
    to = clamp(to < 0 ? to + out_positions : to, 0, out_positions - 1);
    return out_offset + batch * out_batch + to * out_position + (row - token * heads) * out_row;
#else
    return out_offset + row * out_row;
#endif
}

void store(V v, int row, int col) {
#if BLOCKS != 2
    buf_out[UNIT(base_of_out(row) + offset_in_row(col))] = STORED(v);
#endif
#if BLOCKS && TOGETHER == 1
    buf_blocks[UNIT(blocks_offset + BLOCK_ELEMENT(row, col, columns))] = STORED(v);
#endif
}

void store_statistics(int row, float mean, float rstd) {
#if STATS
    if (LANE == 0) {
#if !RMS
        buf_mean[mean_offset + row] = TO_STATS(mean);
#endif
        buf_rstd[rstd_offset + row] = TO_STATS(rstd);
    }
#endif
}

float rstd_of(float squares) { return 1.0 / sqrt(squares / float(columns) + intBitsToFloat(eps_bits)); }

#if CACHE
#if TOGETHER == 2
#define TASKS ((rows + 15) / 16 * 8)
#define ROW_OF(task, r) ((task) / 8 * 16 + (task) % 8 + 8 * (r))
#define HAS_ROW(row) ((row) < rows)
#define NEAREST(row) min(row, rows - 1)
#else
#define TASKS rows
#define ROW_OF(task, r) (task)
#define HAS_ROW(row) true
#define NEAREST(row) (row)
#endif

// Normalizes rows that invocations keep in registers. Blocks have rows behind the last one: they get
// what the last row has.
void normalize(int task) {
    V kept[TOGETHER][CACHE];
    PER_ROW pivot = PER_ROW(0.0);
    UNROLL for (int r = 0; r < TOGETHER; r++) {
        int base = base_of_x(NEAREST(ROW_OF(task, r)));
#if !RMS
        OF_ROW(pivot, r) = pivot_of(base);
#endif
        UNROLL for (int k = 0; k < CACHE; k++) {
            int col = EACH * (LANE + k * LANES);
            kept[r][k] = V(OF_ROW(pivot, r));
            if (col < columns) kept[r][k] = load(base, col);
        }
    }
    PER_ROW mean = PER_ROW(0.0);
#if !RMS
    PER_ROW rest = PER_ROW(0.0);
    UNROLL for (int r = 0; r < TOGETHER; r++) {
        V sum = V(0.0);
        UNROLL for (int k = 0; k < CACHE; k++) sum += kept[r][k] - OF_ROW(pivot, r);
        OF_ROW(mean, r) = SUM(sum);
    }
    mean = sum_all(mean) / float(columns);
    rest = mean_rest(pivot, mean);
    mean += pivot;
#endif
    PER_ROW squares = PER_ROW(0.0);
    UNROLL for (int r = 0; r < TOGETHER; r++) {
        V sum = V(0.0);
        UNROLL for (int k = 0; k < CACHE; k++) {
#if !RMS
            kept[r][k] = (kept[r][k] - OF_ROW(mean, r)) - OF_ROW(rest, r);
#endif
            if (EACH * (LANE + k * LANES) < columns) sum += kept[r][k] * kept[r][k];
        }
        OF_ROW(squares, r) = SUM(sum);
    }
    squares = sum_all(squares);
    float rstds[TOGETHER];
    UNROLL for (int r = 0; r < TOGETHER; r++) {
        rstds[r] = rstd_of(OF_ROW(squares, r));
        int row = ROW_OF(task, r);
        if (HAS_ROW(row)) store_statistics(row, OF_ROW(mean, r), rstds[r]);
    }
    UNROLL for (int k = 0; k < CACHE; k++) {
        int col = EACH * (LANE + k * LANES);
        if (col >= columns) continue;
        V made[TOGETHER];
        UNROLL for (int r = 0; r < TOGETHER; r++) {
            int row = ROW_OF(task, r), near = NEAREST(row);
            made[r] = finished(kept[r][k] * rstds[r], near, col, base_of_x(near), OF_ROW(mean, r), rstds[r]);
            if (HAS_ROW(row)) store(made[r], row, col);
        }
#if TOGETHER == 2
        int at = blocks_offset + BLOCK_ELEMENT(ROW_OF(task, 0), col, columns);
        buf_blocks[at >> 3] = uvec4(WORDS_FROM(T_OUT, made[0]), WORDS_FROM(T_OUT, made[1]));
#endif
    }
}
#else
#define TASKS rows

// DO(v, col) for all elements that an invocation has of a row that is not kept.
#define REST_OF_ROW(DO)                          \
    for (; col < columns; col += EACH * LANES) { \
        V v = load(base, col);                   \
        DO(v, col)                               \
    }
#if AHEAD > 1
#define WHOLE_ROW(DO)                                                                             \
    {                                                                                             \
        int col = EACH * LANE;                                                                    \
        for (; col + (AHEAD - 1) * EACH * LANES < columns; col += AHEAD * EACH * LANES) {         \
            V some[AHEAD];                                                                        \
            UNROLL for (int k = 0; k < AHEAD; k++) some[k] = load(base, col + k * EACH * LANES);  \
            UNROLL for (int k = 0; k < AHEAD; k++) { DO(some[k], (col + k * EACH * LANES)) }      \
        }                                                                                         \
        REST_OF_ROW(DO)                                                                           \
    }
#else
#define WHOLE_ROW(DO)          \
    {                          \
        int col = EACH * LANE; \
        REST_OF_ROW(DO)        \
    }
#endif
#if RMS
#define APART(v) (v)
#else
#define APART(v) ((v - mean) - rest)
#endif
#define ADD(v, col) sum += v - pivot;
#define ADD_SQUARE(v, col) sum += APART(v) * APART(v);
#define STORE(v, col) store(finished(APART(v) * rstd, row, col, base, mean, rstd), row, col);

void normalize(int row) {
    int base = base_of_x(row);
    float mean = 0.0;
    V sum = V(0.0);
#if !RMS
    float pivot = pivot_of(base);
    WHOLE_ROW(ADD)
    mean = sum_all(SUM(sum)) / float(columns);
    float rest = mean_rest(pivot, mean);
    mean += pivot;
    sum = V(0.0);
#endif
    WHOLE_ROW(ADD_SQUARE)
    float rstd = rstd_of(sum_all(SUM(sum)));
    store_statistics(row, mean, rstd);
    WHOLE_ROW(STORE)
}
#endif

#if GROUP
#define OWN ceil(columns, TEAM_LANES)
#else
#define OWN ceil(columns, EACH * TEAM_LANES)
#endif
#if CACHE
LOOPS(loop(ceil(TASKS, workgroups * TEAM), (2 - RMS) * JOIN_LOOPS))
#else
// Each element is read three times, or twice.
LOOPS(loop(ceil(TASKS, workgroups * TEAM), (3 - RMS) * (loop(OWN / AHEAD) + loop(min(OWN, AHEAD - 1))) + (2 - RMS) * JOIN_LOOPS))
#endif

void main() {
    for (int task = ROW_FIRST; task < TASKS; task += ROW_STEP) normalize(task);
}
