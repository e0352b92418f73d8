#version 450
#extension GL_GOOGLE_include_directive : enable
// 2-D convolution of NCHW images with few input channels, in all or in each group (one: depthwise).
// One invocation makes ROWS outputs of a column, in EACH channels of a group. They share what it
// reads of an input channel.
//
// Buffers: a (the input), b (the weight [KH, KW, IC, OC_total]), bias [OC_total] (if BIAS), out (dense),
//   and what EXTRA_BUFFERS declares.
// Strides and offsets are in elements.
// Macros: ROWS, EACH (divides OC); T_A, T_B, T_BIAS, T_OUT, BIAS, EXTRA_BUFFERS as in
//   matmul_io.glslh.
//   VEC4_B  1: EACH, OC and offset_b are multiples of 4
//   NHWC  1: the result is NHWC
//   VEC4_OUT  1: (NHWC) 4 elements are written together: EACH, OC_total and offset_o are multiples
//     of 4
//   EPILOGUE(v, at, n)  the value to store from the float v = sum + bias, at element `at` of the
//     result, in channel n
//   EPILOGUE4(v, at, n)  (VEC4_OUT) the same for the vec4 of four channels
// Grid: batches * OC_total / EACH * ceil(OH / ROWS) * OW invocations, along x and, if that is too
//   small, along y.
#include "core/common.glslh"
#include "core/elements.glslh"
#pragma purevk macro HAS_8BIT
#ifdef HAS_8BIT
#extension GL_EXT_shader_8bit_storage : require
#endif

#ifndef ROWS
#define ROWS 4
#endif
#ifndef EACH
#define EACH 1
#endif
#ifndef T_A
#define T_A float
#endif
#ifndef T_B
#define T_B float
#endif
#ifndef T_BIAS
#define T_BIAS float
#endif
#ifndef T_OUT
#define T_OUT float
#endif
#ifndef VEC4_B
#define VEC4_B 0
#endif
#ifndef BIAS
#define BIAS 0
#endif
#ifndef NHWC
#define NHWC 0
#endif
#ifndef VEC4_OUT
#define VEC4_OUT 0
#endif
#ifndef EXTRA_BUFFERS
#define EXTRA_BUFFERS
#endif
#ifndef EPILOGUE
#define EPILOGUE(v, at, n) (v)
#endif
#ifndef EPILOGUE4
#define EPILOGUE4(v, at, n) (v)
#endif

PARAM(0, offset_a)  // of the input in its buffer
PARAM(1, offset_b)  // of the weight
PARAM(2, offset_o)  // of out
#if BIAS
PARAM(3, offset_bias)  // of the bias
#endif
PARAM(4, batches)
PARAM(5, IC)  // input channels of one group
PARAM(6, OC)  // output channels of one group
PARAM(7, channels)  // OC_total
PARAM(8, H)
PARAM(9, W)
PARAM(10, OH)
PARAM(11, OW)
SPEC_CONSTANT(12, KH)
SPEC_CONSTANT(13, KW)
SPEC_CONSTANT(14, stride_y)
SPEC_CONSTANT(15, stride_x)
SPEC_CONSTANT(16, pad_y)  // padding before
SPEC_CONSTANT(17, pad_x)
SPEC_CONSTANT(18, dilation_y)
SPEC_CONSTANT(19, dilation_x)
PARAM(20, image_a)  // strides of the input; that of the column is 1
PARAM(21, channel_a)
PARAM(22, row_a)

READONLY_BUFFER(0, a, T_A)
#if VEC4_B
READONLY_BUFFER(1, b, QUAD_OF(T_B))
#else
READONLY_BUFFER(1, b, T_B)
#endif
#if BIAS
READONLY_BUFFER(2, bias, T_BIAS)
#endif
#if VEC4_OUT
WRITEONLY_BUFFER(2 + BIAS, out, QUAD_OF(T_OUT))
#else
WRITEONLY_BUFFER(2 + BIAS, out, T_OUT)
#endif
#define EXTRA_BINDING (3 + BIAS)
EXTRA_BUFFERS

layout(local_size_x_id = 100) in;

// Rows of the input that the windows of ROWS outputs span.
const int SPAN = (ROWS - 1) * stride_y + (KH - 1) * dilation_y + 1;
// Without padding, only outputs that are not there reach beyond the input.
const bool PADDED = pad_y > 0 || pad_x > 0;

void main() {
    int group_size = int(gl_WorkGroupSize.x);
    int id = int(gl_WorkGroupID.x + gl_WorkGroupID.y * gl_NumWorkGroups.x) * group_size + int(gl_LocalInvocationIndex);
    int blocks = (OH + ROWS - 1) / ROWS, parts = channels / EACH;
    int q = id / OW, ox = id - q * OW, s = q / blocks, oy = (q - s * blocks) * ROWS, image = s / parts;
    if (image >= batches) return;
    int first = (s - image * parts) * EACH;
    int y0 = oy * stride_y - pad_y, x0 = ox * stride_x - pad_x;
    int column[KW];
    bool inside[KW];
    UNROLL for (int k = 0; k < KW; k++) {
        int x = x0 + k * dilation_x;
        inside[k] = x >= 0 && x < W;
        column[k] = clamp(x, 0, W - 1);
    }
    float acc[ROWS][EACH];
    UNROLL for (int r = 0; r < ROWS; r++) UNROLL for (int o = 0; o < EACH; o++) acc[r][o] = 0.0;
    int base = offset_a + image * image_a + first / OC * IC * channel_a;
    [[dont_unroll]] for (int c = 0; c < IC; c++) {
        float v[SPAN * KW];
        UNROLL for (int t = 0; t < SPAN; t++) {
            int from = base + clamp(y0 + t, 0, H - 1) * row_a;
            UNROLL for (int k = 0; k < KW; k++) v[t * KW + k] = FLOAT_OF(T_A, buf_a[from + column[k]]);
        }
        if (PADDED) {
            UNROLL for (int t = 0; t < SPAN; t++) {
                bool row = y0 + t >= 0 && y0 + t < H;
                UNROLL for (int k = 0; k < KW; k++) v[t * KW + k] = row && inside[k] ? v[t * KW + k] : 0.0;
            }
        }
        UNROLL for (int ky = 0; ky < KH; ky++) {
            UNROLL for (int kx = 0; kx < KW; kx++) {
                int at = offset_b + ((ky * KW + kx) * IC + c) * channels + first;
                float w[EACH];
#if VEC4_B
                UNROLL for (int o = 0; o < EACH; o += 4) {
                    vec4 four = FLOATS_OF(T_B, buf_b[(at + o) >> 2]);
                    w[o] = four.x;
                    w[o + 1] = four.y;
                    w[o + 2] = four.z;
                    w[o + 3] = four.w;
                }
#else
                UNROLL for (int o = 0; o < EACH; o++) w[o] = FLOAT_OF(T_B, buf_b[at + o]);
#endif
                UNROLL for (int r = 0; r < ROWS; r++) {
                    float a = v[(r * stride_y + ky * dilation_y) * KW + kx];
                    UNROLL for (int o = 0; o < EACH; o++) acc[r][o] += a * w[o];
                }
            }
        }
        base += channel_a;
    }
#if BIAS
    UNROLL for (int o = 0; o < EACH; o++) {
        float bias = FLOAT_OF(T_BIAS, buf_bias[offset_bias + first + o]);
        UNROLL for (int r = 0; r < ROWS; r++) acc[r][o] += bias;
    }
#endif
    UNROLL for (int r = 0; r < ROWS; r++) {
        if (oy + r < OH) {
#if NHWC
        int from = ((image * OH + oy + r) * OW + ox) * channels + first;
        const int step = 1;
#else
        int step = OH * OW, from = ((image * channels + first) * OH + oy + r) * OW + ox;
#endif
#if VEC4_OUT
        UNROLL for (int o = 0; o < EACH; o += 4) {
            vec4 v = vec4(acc[r][o], acc[r][o + 1], acc[r][o + 2], acc[r][o + 3]);
            buf_out[(offset_o + from + o) >> 2] = QUAD_FROM(T_OUT, EPILOGUE4(v, (from + o), (first + o)));
        }
#else
        UNROLL for (int o = 0; o < EACH; o++) {
            int at = from + o * step, n = first + o;
            buf_out[offset_o + at] = ELEMENT_OF(T_OUT, EPILOGUE(acc[r][o], at, n));
        }
#endif
        }
    }
}
