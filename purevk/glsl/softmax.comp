#version 450
#extension GL_GOOGLE_include_directive : enable
// out[row, c] = EPILOGUE(softmax over c of LOAD(x[row, c], row, c), row, c), or log_softmax, with sums in float.
//
// Bindings: 0 x, 1 out, then what EXTRA_BUFFERS declares.
// Parameters (in elements; outer dim 0 is the innermost of up to three that count the rows):
//   0 offset of x  1 offset of out  2 rows  3 columns  4, 5 stride of a column in x, in out
//   6, 7, 8 strides of the outer dims 0, 1, 2 in x  9, 10, 11 the same in out  12, 13 sizes of the outer dims 0, 1
//   14 and above are free for EXTRA_BUFFERS.
// Macros:
//   T_X, T_OUT  float or float16_t; FROM_X(v), TO_OUT(v), TO_OUT4(v) convert to and from float
//   TEXEL_X 1     x is a uniform texel buffer: rows.glslh
//   OUTER_DIMS 1..3
//   LOG 1         log_softmax
//   ZERO_ROWS 1   a row that is -inf everywhere gives 0 (softmax), rather than NaN
//   LOAD(v, row, col), EPILOGUE(v, row, col)  float expressions, for a scale, a mask and so on
//   ROW_PER_SUBGROUP, ROW_PER_INVOCATION, SUBGROUP, LOCAL: rows.glslh, where the grid stands
//   VEC4 1        x and out are read and written as vec4: the column strides are 1; columns, other strides and both
//                 offsets are multiples of 4
//   CACHE n > 0   a row is read once and kept in registers, n elements (vec4s if VEC4) an invocation: columns must be
//                 at most n * invocations of a row (* 4 if VEC4). 0: rows of any length, read twice.
#include "rows.glslh"
#include "math.glslh"

#ifndef T_OUT
#define T_OUT float
#endif
#ifndef FROM_X
#define FROM_X(v) float(v)
#endif
#ifndef TO_OUT
#define TO_OUT(v) T_OUT(v)
#endif
#ifndef TO_OUT4
#define TO_OUT4(v) VEC4_OF(T_OUT)(v)
#endif
#ifndef OUTER_DIMS
#define OUTER_DIMS 1
#endif
#ifndef LOG
#define LOG 0
#endif
#ifndef ZERO_ROWS
#define ZERO_ROWS 0
#endif
#ifndef LOAD
#define LOAD(v, row, col) (v)
#endif
#ifndef EPILOGUE
#define EPILOGUE(v, row, col) (v)
#endif
#ifndef EXTRA_BUFFERS
#define EXTRA_BUFFERS
#endif
#ifndef CACHE
#define CACHE 0
#endif

PARAM_0(x_offset)
PARAM_1(out_offset)
PARAM_2(rows)
PARAM_3(columns)
PARAM_6(x_stride_0)
PARAM_9(out_stride_0)
#if OUTER_DIMS > 1
PARAM_7(x_stride_1)
PARAM_10(out_stride_1)
PARAM_12(size_0)
#endif
#if OUTER_DIMS > 2
PARAM_8(x_stride_2)
PARAM_11(out_stride_2)
PARAM_13(size_1)
#endif

#if VEC4
layout(set = 0, binding = 1) buffer BufOut { VEC4_OF(T_OUT) buf_out[]; };
#define V vec4
#define EACH 4
#define SUM(v) (((v).x + (v).y) + ((v).z + (v).w))
#define LARGEST(v) max(max((v).x, (v).y), max((v).z, (v).w))
#else
PARAM_4(x_column)
PARAM_5(out_column)
layout(set = 0, binding = 1) buffer BufOut { T_OUT buf_out[]; };
#define V float
#define EACH 1
#define SUM(v) (v)
#define LARGEST(v) (v)
#endif
EXTRA_BUFFERS

#define MINUS_INF uintBitsToFloat(0xff800000u)

V load(int base, int row, int col) {
#if VEC4
    X4 v = READ4_X(base + col);
    return vec4(LOAD(FROM_X(v.x), row, (col)), LOAD(FROM_X(v.y), row, (col + 1)), LOAD(FROM_X(v.z), row, (col + 2)),
                LOAD(FROM_X(v.w), row, (col + 3)));
#else
    float v = FROM_X(READ_X(base + col * x_column));
    return LOAD(v, row, col);
#endif
}

void store(V v, int base, int row, int col) {
#if VEC4
    buf_out[(base + col) >> 2] =
        TO_OUT4(vec4(EPILOGUE(v.x, row, (col)), EPILOGUE(v.y, row, (col + 1)), EPILOGUE(v.z, row, (col + 2)),
                     EPILOGUE(v.w, row, (col + 3))));
#else
    buf_out[base + col * out_column] = TO_OUT(EPILOGUE(v, row, col));
#endif
}

// A row of -inf has no largest element to subtract; exp(-inf - 0) is 0 then, as it should be.
float subtrahend(float largest) { return largest < -3.4028234e38 ? 0.0 : largest; }

#if CACHE
#if SUBGROUP || ROW_PER_SUBGROUP
float shuffle_xor(float v, uint d) { return subgroupShuffleXor(v, d); }
#endif
float add(float a, float b) { return a + b; }
DEFINE_JOIN(float, max_all, max)
DEFINE_JOIN(float, sum_all, add)
#else
// x: the largest element. y: the sum of exp(element - largest).
vec2 join(vec2 a, vec2 b) {
    float largest = max(a.x, b.x), s = subtrahend(largest);
    return vec2(largest, a.y * exp(a.x - s) + b.y * exp(b.x - s));
}
#if SUBGROUP || ROW_PER_SUBGROUP
vec2 shuffle_xor(vec2 v, uint d) { return subgroupShuffleXor(v, d); }
#endif
DEFINE_JOIN(vec2, join_all, join)
#endif

#if LOG
#define RESULT(v) ((v) - s - log_total)
#else
#define RESULT(v) (exp((v) - s) * inverse)
#endif

void main() {
    for (int row = ROW_FIRST; row < rows; row += ROW_STEP) {
        int base = x_offset, out_base = out_offset;
#if OUTER_DIMS > 1
        int q = row / size_0, i = row - q * size_0;
        base += i * x_stride_0;
        out_base += i * out_stride_0;
#if OUTER_DIMS > 2
        int p = q / size_1;
        i = q - p * size_1;
        base += i * x_stride_1 + p * x_stride_2;
        out_base += i * out_stride_1 + p * out_stride_2;
#else
        base += q * x_stride_1;
        out_base += q * out_stride_1;
#endif
#else
        base += row * x_stride_0;
        out_base += row * out_stride_0;
#endif
        float s, total;
#if CACHE
        V kept[CACHE];
        V most = V(MINUS_INF);
        UNROLL for (int k = 0; k < CACHE; k++) {
            int col = EACH * (LANE + k * LANES);
            kept[k] = V(MINUS_INF);
            if (col < columns) kept[k] = load(base, row, col);
            most = max(most, kept[k]);
        }
        s = subtrahend(max_all(LARGEST(most)));
        V sum = V(0.0);
        UNROLL for (int k = 0; k < CACHE; k++) {
#if LOG
            sum += exp(kept[k] - s);
#else
            kept[k] = exp(kept[k] - s);
            sum += kept[k];
#endif
        }
        total = sum_all(SUM(sum));
#else
        float largest = MINUS_INF;
        total = 0.0;
        for (int col = EACH * LANE; col < columns; col += EACH * LANES) {
            V v = load(base, row, col);
            float before = largest;
            largest = max(largest, LARGEST(v));
            s = subtrahend(largest);
            V e = exp(v - s);
            total = total * exp(before - s) + SUM(e);
        }
        vec2 all_of_row = join_all(vec2(largest, total));
        s = subtrahend(all_of_row.x);
        total = all_of_row.y;
#endif
        // 0 * (1 / 0) and -inf - log(0) are NaN, but a compiler may take x * (1 / x) for 1 and log(exp(x)) for x.
#if LOG
        float log_total = total == 0.0 ? uintBitsToFloat(0x7fc00000u) : log(total);
#elif ZERO_ROWS
        float inverse = total == 0.0 ? 0.0 : 1.0 / total;
#else
        float inverse = total == 0.0 ? uintBitsToFloat(0x7fc00000u) : 1.0 / total;
#endif
#if CACHE
        UNROLL for (int k = 0; k < CACHE; k++) {
            int col = EACH * (LANE + k * LANES);
#if LOG
            if (col < columns) store(RESULT(kept[k]), out_base, row, col);
#else
            if (col < columns) store(kept[k] * inverse, out_base, row, col);
#endif
        }
#else
        for (int col = EACH * LANE; col < columns; col += EACH * LANES) {
            V v = load(base, row, col);
            store(RESULT(v), out_base, row, col);
        }
#endif
    }
}
