#version 450
#extension GL_GOOGLE_include_directive : enable
// Max pooling (with or without indices) and average pooling over windows of H x W; 1-D is H = 1.
//
// Buffers: x, out and, if INDICES, index. Offsets and strides are in elements.
// Macros:
//   T_X, T_OUT  element types
//   ACC  the type computed in
//   FROM_X(v), TO_OUT(v), TO_OUT4(v)  conversions
//   TEXEL_X  1: x is a uniform texel buffer; see rows.glslh
//   AVERAGE  0: maximum. LOWEST is the least value of ACC; NaN wins, as in torch; padding is
//     ignored. 1: average. COUNT_INCLUDE_PAD 1 counts the padding.
//   INDICES  1: h * W + w of the maximum, as T_INDEX through TO_INDEX(v)
//   ADAPTIVE  1: window i of OH covers floor(i * H / OH) .. ceil((i + 1) * H / OH)
//   NHWC  1: neighbouring invocations make neighbouring channels; 0: neighbouring columns
//   VEC4  1: (NHWC) four channels per invocation: strides of c are 1; C, other strides and offsets
//     are multiples of 4
//   UNROLLED  1: (not with ADAPTIVE) all elements of a window are read before the first is used:
//     for small windows on GPUs. The parameters of the window are specialization constants.
// ceil_mode is in OH and OW.
// Grid: groups = ceil(outputs / (VEC4 ? 4 : 1) / local_size_x), (min(groups, 65535),
//   ceil(groups / 65535), 1).
#undef ROW_PER_INVOCATION
#define ROW_PER_INVOCATION 1
#include "core/rows.glslh"
#include "core/math.glslh"

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
#ifndef TO_OUT4
#define TO_OUT4(v) VEC4_OF(T_OUT)(v)
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
#ifndef ADAPTIVE
#define ADAPTIVE 0
#endif
#ifndef NHWC
#define NHWC 1
#endif
#ifndef UNROLLED
#define UNROLLED 0
#endif

PARAM(0, x_offset)
PARAM(1, out_offset)
PARAM(2, outputs)  // N * C * OH * OW
PARAM(3, C)
PARAM(4, H)
PARAM(5, W)
PARAM(6, OH)
PARAM(7, OW)
#if !ADAPTIVE
PARAM(8, kernel_h)
PARAM(9, kernel_w)
PARAM(10, stride_h)
PARAM(11, stride_w)
PARAM(12, pad_h)
PARAM(13, pad_w)
PARAM(14, dilation_h)
PARAM(15, dilation_w)
#endif
PARAM(16, x_n)  // strides
PARAM(17, x_h)
PARAM(18, x_w)
PARAM(19, x_c)
PARAM(20, out_n)  // strides of out and of the indices
PARAM(21, out_h)
PARAM(22, out_w)
PARAM(23, out_c)
#if AVERAGE
PARAM(24, divisor)  // 0: the number of elements
#endif
#if INDICES
PARAM(25, index_offset)
#endif

#if VEC4
BUFFER(1, out, VEC4_OF(T_OUT))
#define EACH 4
#else
BUFFER(1, out, T_OUT)
#define EACH 1
#endif
#if INDICES
BUFFER(2, index, T_INDEX)
#endif

// Without indices, NaN is looked for apart from the maximum, which takes fewer instructions.
#define ONLY_MAXIMUM (!AVERAGE && !INDICES)
#if ONLY_MAXIMUM
bool is_nan(float v) { return pv_isnan(v); }
bool is_nan(int v) { return false; }
float nan_if(bool nan, float v) { return nan ? PV_NAN : v; }
int nan_if(bool nan, int v) { return v; }
#if HAS_INT64
bool is_nan(int64_t v) { return false; }
int64_t nan_if(bool nan, int64_t v) { return v; }
#endif
#elif !AVERAGE
bool wins(float v, float best) { return v > best || pv_isnan(v); }
bool wins(int v, int best) { return v > best; }
#if HAS_INT64
bool wins(int64_t v, int64_t best) { return v > best; }
#endif
#endif

#if !UNROLLED && ADAPTIVE
LOOPS(loop(ceil(outputs / EACH, workgroups * TEAM), loop(ceil(H, OH) + 1, loop(ceil(W, OW) + 1))))
#elif !UNROLLED
LOOPS(loop(ceil(outputs / EACH, workgroups * TEAM), loop(kernel_h, loop(kernel_w))))
#else
LOOPS(loop(ceil(outputs / EACH, workgroups * TEAM)))
#endif

void main() {
    for (int i = ROW_FIRST * EACH; i < outputs; i += ROW_STEP * EACH) {
#if NHWC
        int q = i / C, c = i - q * C, p = q / OW, ow = q - p * OW, n = p / OH, oh = p - n * OH;
#else
        int q = i / OW, ow = i - q * OW, p = q / OH, oh = q - p * OH, n = p / C, c = p - n * C;
#endif
        // The window is h0, h0 + step_h, ... below h1, without the padding.
#if ADAPTIVE
        const int step_h = 1, step_w = 1;
        int h0 = oh * H / OH, h1 = ((oh + 1) * H + OH - 1) / OH;
        int w0 = ow * W / OW, w1 = ((ow + 1) * W + OW - 1) / OW;
        int count = (h1 - h0) * (w1 - w0);
#else
        int step_h = dilation_h, step_w = dilation_w;
        int h0 = oh * stride_h - pad_h, w0 = ow * stride_w - pad_w;
        int h1 = h0 + (kernel_h - 1) * step_h + 1, w1 = w0 + (kernel_w - 1) * step_w + 1;
#if AVERAGE && COUNT_INCLUDE_PAD
        int count = (min(h1, H + pad_h) - h0) * (min(w1, W + pad_w) - w0);
#endif
        if (h0 < 0) h0 += (-h0 + step_h - 1) / step_h * step_h;
        if (w0 < 0) w0 += (-w0 + step_w - 1) / step_w * step_w;
        h1 = min(h1, H);
        w1 = min(w1, W);
#if AVERAGE && !COUNT_INCLUDE_PAD
        int count = max(h1 - h0, 0) * max(w1 - w0, 0);
#endif
#endif
        int base = x_offset + n * x_n + c * x_c;
        ACC best[EACH];
#if ONLY_MAXIMUM
        bool has_nan[EACH];
#endif
#if INDICES
        int where[EACH];
#endif
        UNROLL for (int j = 0; j < EACH; j++) {
#if AVERAGE
            best[j] = ACC(0);
#else
            best[j] = ACC(LOWEST);
#endif
#if ONLY_MAXIMUM
            has_nan[j] = false;
#endif
#if INDICES
            where[j] = h0 * W + w0;
#endif
        }
#if VEC4
#define LOADED X4
#define LOAD READ4_X
#define ELEMENT(j) FROM_X(v[j])
#else
#define LOADED ACC
#define LOAD(i) FROM_X(READ_X(i))
#define ELEMENT(j) v
#endif
#if UNROLLED
        UNROLL for (int kh = 0; kh < kernel_h; kh++) {
            UNROLL for (int kw = 0; kw < kernel_w; kw++) {
                int h = oh * stride_h - pad_h + kh * dilation_h, w = ow * stride_w - pad_w + kw * dilation_w;
#if ONLY_MAXIMUM
                // With a dilation of 1, each window has an element of the image, and the nearest one
                // to an element of the padding is of the window too.
                bool inside = dilation_h == 1 && dilation_w == 1 || h >= 0 && h < H && w >= 0 && w < W;
#else
                bool inside = h >= 0 && h < H && w >= 0 && w < W;
#endif
                LOADED v = LOAD(base + clamp(h, 0, H - 1) * x_h + clamp(w, 0, W - 1) * x_w);
#else
        for (int h = h0; h < h1; h += step_h) {
            for (int w = w0; w < w1; w += step_w) {
                const bool inside = true;
                LOADED v = LOAD(base + h * x_h + w * x_w);
#endif
                UNROLL for (int j = 0; j < EACH; j++) {
                    ACC e = ELEMENT(j);
#if AVERAGE
                    best[j] += inside ? e : ACC(0);
#elif ONLY_MAXIMUM
                    if (inside) {
                        best[j] = e > best[j] ? e : best[j];  // compilers may take either of two zeros
                        if (is_nan(e)) has_nan[j] = true;
                    }
#else
                    bool better = inside && wins(e, best[j]);
                    best[j] = better ? e : best[j];
#if INDICES
                    where[j] = better ? h * W + w : where[j];
#endif
#endif
                }
            }
        }
#if AVERAGE
        int by = divisor != 0 ? divisor : count;
        UNROLL for (int j = 0; j < EACH; j++) best[j] = best[j] / ACC(by);
#endif
#if ONLY_MAXIMUM
        UNROLL for (int j = 0; j < EACH; j++) best[j] = nan_if(has_nan[j], best[j]);
#endif
        int at = n * out_n + oh * out_h + ow * out_w + c * out_c;
#if VEC4
        buf_out[(out_offset + at) >> 2] =
            TO_OUT4(VEC4_OF(ACC)(best[0], best[1], best[2], best[3]));
#else
        buf_out[out_offset + at] = TO_OUT(best[0]);
#endif
#if INDICES
        UNROLL for (int j = 0; j < EACH; j++) buf_index[index_offset + at + j] = TO_INDEX(where[j]);
#endif
    }
}
