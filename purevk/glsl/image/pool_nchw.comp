#version 450
#extension GL_GOOGLE_include_directive : enable
// Pooling as pool.comp, for NCHW images and small windows. One invocation makes ROWS outputs of a
// column. Their windows share rows of the input. Each row is read once and reduced to one element.
//
// Buffers: x, out and, if INDICES, index.
// Offsets and strides are in elements. The stride of w in x is 1, and the results are dense.
// Macros: ROWS; T_X, T_OUT, ACC, FROM_X(v), TO_OUT(v), AVERAGE, LOWEST, COUNT_INCLUDE_PAD, INDICES,
//   T_INDEX, TO_INDEX(v) as in pool.comp.
// Every window must meet the input.
// Grid: N * C * ceil(OH / ROWS) * OW invocations, as for pool.comp.
#undef ROW_PER_INVOCATION
#define ROW_PER_INVOCATION 1
#include "core/rows.glslh"
#include "core/math.glslh"

#ifndef ROWS
#define ROWS 4
#endif
#ifndef T_OUT
#define T_OUT float
#endif
#ifndef ACC
#define ACC float
#endif
#ifndef FROM_X
#define FROM_X(v) ACC(v)
#endif
#ifndef TO_OUT
#define TO_OUT(v) T_OUT(v)
#endif
#ifndef AVERAGE
#define AVERAGE 0
#endif
#ifndef LOWEST
#define LOWEST -PV_INF
#endif
#ifndef COUNT_INCLUDE_PAD
#define COUNT_INCLUDE_PAD 1
#endif
#ifndef INDICES
#define INDICES 0
#endif
#ifndef T_INDEX
#define T_INDEX int
#endif
#ifndef TO_INDEX
#define TO_INDEX(v) T_INDEX(v)
#endif

PARAM(0, x_offset)
PARAM(1, out_offset)
PARAM(2, channels)  // N * C
PARAM(3, C)
PARAM(4, H)
PARAM(5, W)
PARAM(6, OH)
PARAM(7, OW)
SPEC_CONSTANT(8, kernel_h)
SPEC_CONSTANT(9, kernel_w)
SPEC_CONSTANT(10, stride_h)
SPEC_CONSTANT(11, stride_w)
SPEC_CONSTANT(12, pad_h)
SPEC_CONSTANT(13, pad_w)
SPEC_CONSTANT(14, dilation_h)
SPEC_CONSTANT(15, dilation_w)
PARAM(16, x_n)  // strides
PARAM(17, x_c)
PARAM(18, x_h)
#if AVERAGE
PARAM(19, divisor)  // 0: the number of elements
#endif
#if INDICES
PARAM(20, index_offset)
WRITEONLY_BUFFER(2, index, T_INDEX)
#endif
WRITEONLY_BUFFER(1, out, T_OUT)

// Rows of the input that the windows of ROWS outputs span.
const int SPAN = (ROWS - 1) * stride_h + (kernel_h - 1) * dilation_h + 1;
// Where the window's elements are neighbours, an index beyond an end may be replaced by that of the
// end, which is in the window too.
const bool CLAMPED = AVERAGE == 0 && dilation_h == 1 && dilation_w == 1;

#if !AVERAGE
bool wins(float v, float best) { return v > best || pv_isnan(v); }
bool wins(int v, int best) { return v > best; }
#if HAS_INT64
bool wins(int64_t v, int64_t best) { return v > best; }
#endif
#endif

// The first index of the window, from `from` on, that is not before the input.
int first_inside(int from, int dilation) { return from < 0 ? from + (dilation - 1 - from) / dilation * dilation : from; }

void main() {
    int id = FLAT_ID, blocks = (OH + ROWS - 1) / ROWS;
    int q = id / OW, ow = id - q * OW, channel = q / blocks, oh = (q - channel * blocks) * ROWS;
    if (channel >= channels) return;
    int n = channel / C, c = channel - n * C;
    int base = x_offset + n * x_n + c * x_c;
    int h0 = oh * stride_h - pad_h, w0 = ow * stride_w - pad_w;
    int column[kernel_w];
    UNROLL for (int k = 0; k < kernel_w; k++) column[k] = clamp(w0 + k * dilation_w, 0, W - 1);
    ACC row[SPAN];
#if INDICES
    int at[SPAN];
#endif
    UNROLL for (int t = 0; t < SPAN; t++) {
        int y = h0 + t, from = base + clamp(y, 0, H - 1) * x_h;
        ACC v[kernel_w];
        UNROLL for (int k = 0; k < kernel_w; k++) v[k] = FROM_X(READ_X(from + column[k]));
#if AVERAGE
        row[t] = ACC(0);
#else
        row[t] = ACC(LOWEST);
#endif
#if INDICES
        at[t] = first_inside(w0, dilation_w);
#endif
        UNROLL for (int k = 0; k < kernel_w; k++) {
            int x = w0 + k * dilation_w;
            bool inside = CLAMPED || (y >= 0 && y < H && x >= 0 && x < W);
#if AVERAGE
            row[t] += inside ? v[k] : ACC(0);
#else
            bool better = inside && wins(v[k], row[t]);
            row[t] = better ? v[k] : row[t];
#if INDICES
            at[t] = better ? column[k] : at[t];
#endif
#endif
        }
    }
    int to = (channel * OH + oh) * OW + ow;
    UNROLL for (int r = 0; r < ROWS; r++) {
        int h = h0 + r * stride_h;
        ACC best = row[r * stride_h];
#if INDICES
        int where = clamp(first_inside(h, dilation_h), 0, H - 1) * W + at[r * stride_h];
#endif
        UNROLL for (int k = 1; k < kernel_h; k++) {
            int t = r * stride_h + k * dilation_h;
#if AVERAGE
            best += row[t];
#else
            bool better = wins(row[t], best);
            best = better ? row[t] : best;
#if INDICES
            where = better ? clamp(h0 + t, 0, H - 1) * W + at[t] : where;
#endif
#endif
        }
#if AVERAGE
        int h1 = h + (kernel_h - 1) * dilation_h + 1, w1 = w0 + (kernel_w - 1) * dilation_w + 1;
#if COUNT_INCLUDE_PAD
        int count = (min(h1, H + pad_h) - h) * (min(w1, W + pad_w) - w0);
#else
        int count = max(min(h1, H) - max(h, 0), 0) * max(min(w1, W) - max(w0, 0), 0);
#endif
        best = best / ACC(divisor != 0 ? divisor : count);
#endif
        if (oh + r < OH) {
            buf_out[out_offset + to + r * OW] = TO_OUT(best);
#if INDICES
            buf_index[index_offset + to + r * OW] = TO_INDEX(where);
#endif
        }
    }
}
