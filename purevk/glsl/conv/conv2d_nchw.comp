#version 450
#extension GL_GOOGLE_include_directive : enable
// 2-D convolution of NCHW images with few input channels, in all or in each group (one: depthwise).
// One invocation makes OUTPUTS outputs of a column, or of a row, in EACH channels of a group. They
// share what it reads of an input channel.
//
// Buffers: a (the input), b (the weight [KH, KW, IC, OC_total]), bias [OC_total] (if BIAS), out (dense),
//   and what EXTRA_BUFFERS declares.
// Strides and offsets are in elements.
// Macros: OUTPUTS, EACH (divides OC); T_A, T_B, T_BIAS, T_OUT, BIAS, EXTRA_BUFFERS as in
//   matmul_io.glslh.
//   VEC4_B  1: EACH, OC and offset_b are multiples of 4
//   ALONG_X  1: the OUTPUTS outputs are of a row, 0: of a column
//   NHWC  1: the result is NHWC
//   VEC4_OUT  1: (NHWC) 4 elements are written together: EACH, OC_total and offset_o are multiples
//     of 4
//   EPILOGUE(v, at, n)  the value to store from the float v = sum + bias, at element `at` of the
//     result, in channel n
//   EPILOGUE4(v, at, n)  (VEC4_OUT) the same for the vec4 of four channels
// Grid: batches * OC_total / EACH * ceil(OH / OUTPUTS) * OW invocations, or with ALONG_X * OH *
//   ceil(OW / OUTPUTS), along x and, if that is too small, along y.
#include "core/common.glslh"
#include "core/elements.glslh"
#pragma purevk macro HAS_8BIT
#ifdef HAS_8BIT
#extension GL_EXT_shader_8bit_storage : require
#endif

#ifndef OUTPUTS
#define OUTPUTS 4
#endif
#ifndef ALONG_X
#define ALONG_X 0
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

// What is along the line of the outputs of an invocation, and what is across it.
#if ALONG_X
#define ALONG(y, x) (x)
#define ACROSS(y, x) (y)
#else
#define ALONG(y, x) (y)
#define ACROSS(y, x) (x)
#endif
const int TAPS = ALONG(KH, KW), STEP = ALONG(stride_y, stride_x), DILATION = ALONG(dilation_y, dilation_x);
const int TAPS_ACROSS = ACROSS(KH, KW);
// Elements of a line of the input that the windows of all outputs span.
const int SPAN = (OUTPUTS - 1) * STEP + (TAPS - 1) * DILATION + 1;
// Without padding, only outputs that are not there reach beyond the input.
const bool PADDED = pad_y > 0 || pad_x > 0;

LOOPS(loop(IC))

void main() {
    int group_size = int(gl_WorkGroupSize.x);
    int id = int(WORKGROUP_ID.x + WORKGROUP_ID.y * gl_NumWorkGroups.x) * group_size + int(gl_LocalInvocationIndex);
    int high = ALONG((OH + OUTPUTS - 1) / OUTPUTS, OH), wide = ALONG(OW, (OW + OUTPUTS - 1) / OUTPUTS);
    int parts = channels / EACH, q = id / wide, s = q / high, image = s / parts;
    if (image >= batches) return;
    int first = (s - image * parts) * EACH;
    int oy = (q - s * high) * ALONG(OUTPUTS, 1), ox = (id - q * wide) * ALONG(1, OUTPUTS);
    int y0 = oy * stride_y - pad_y, x0 = ox * stride_x - pad_x;
    int lines[TAPS_ACROSS];  // elements of the input
    bool inside[TAPS_ACROSS];
    UNROLL for (int k = 0; k < TAPS_ACROSS; k++) {
        int at = ACROSS(y0 + k * dilation_y, x0 + k * dilation_x);
        inside[k] = at >= 0 && at < ACROSS(H, W);
        lines[k] = clamp(at, 0, ACROSS(H, W) - 1) * ACROSS(row_a, 1);
    }
    float acc[OUTPUTS][EACH];
    UNROLL for (int r = 0; r < OUTPUTS; r++) UNROLL for (int o = 0; o < EACH; o++) acc[r][o] = 0.0;
    int base = offset_a + image * image_a + first / OC * IC * channel_a;
    [[dont_unroll]] for (int c = 0; c < IC; c++) {
        float v[SPAN * TAPS_ACROSS];
        UNROLL for (int t = 0; t < SPAN; t++) {
            int from = base + clamp(ALONG(y0, x0) + t, 0, ALONG(H, W) - 1) * ALONG(row_a, 1);
            UNROLL for (int k = 0; k < TAPS_ACROSS; k++) v[t * TAPS_ACROSS + k] = FLOAT_OF(T_A, buf_a[from + lines[k]]);
        }
        if (PADDED) {
            UNROLL for (int t = 0; t < SPAN; t++) {
                bool there = ALONG(y0, x0) + t >= 0 && ALONG(y0, x0) + t < ALONG(H, W);
                UNROLL for (int k = 0; k < TAPS_ACROSS; k++) {
                    v[t * TAPS_ACROSS + k] = there && inside[k] ? v[t * TAPS_ACROSS + k] : 0.0;
                }
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
                UNROLL for (int r = 0; r < OUTPUTS; r++) {
                    float a = v[(r * STEP + ALONG(ky, kx) * DILATION) * TAPS_ACROSS + ACROSS(ky, kx)];
                    UNROLL for (int o = 0; o < EACH; o++) acc[r][o] += a * w[o];
                }
            }
        }
        base += channel_a;
    }
#if BIAS
    UNROLL for (int o = 0; o < EACH; o++) {
        float bias = FLOAT_OF(T_BIAS, buf_bias[offset_bias + first + o]);
        UNROLL for (int r = 0; r < OUTPUTS; r++) acc[r][o] += bias;
    }
#endif
    UNROLL for (int r = 0; r < OUTPUTS; r++) {
        int y = oy + ALONG(r, 0), x = ox + ALONG(0, r);
        if (ALONG(y, x) < ALONG(OH, OW)) {
#if NHWC
        int from = ((image * OH + y) * OW + x) * channels + first;
        const int step = 1;
#else
        int step = OH * OW, from = ((image * channels + first) * OH + y) * OW + x;
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
