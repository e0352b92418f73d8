#version 450
#extension GL_GOOGLE_include_directive : enable
// Normalizes by the moments of slices, see `group_slices.glslh`:
// out = EPILOGUE((x - mean) * rstd * weight + bias, row, col).
//
// Buffers: x, moments, weight (if HAS_WEIGHT), bias (if HAS_BIAS), out, and what EXTRA_BUFFERS declares.
// Parameters from number 15 on are free for EXTRA_BUFFERS.
// Macros: those of `group_slices.glslh`, and
//   T_W, T_OUT  element types of weight and bias, and of the result
//   HAS_WEIGHT, HAS_BIAS  1: there is a weight, a bias
//   EPILOGUE(v, row, col)   what is stored. NHWC: row is a pixel (image * area + pixel), col a channel;
//                           else row is a channel (image * channels + channel), col a pixel
//   EPILOGUE4(v, row, col)  the same for the vec4 of the columns col .. col + 3
#include "reduce/group_slices.glslh"

#ifndef T_W
#define T_W float
#endif
#ifndef T_OUT
#define T_OUT float
#endif
#ifndef HAS_WEIGHT
#define HAS_WEIGHT 0
#endif
#ifndef HAS_BIAS
#define HAS_BIAS 0
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

PARAM(6, out_offset)
PARAM(7, eps_bits)  // of a float
#if HAS_WEIGHT
PARAM(8, weight_offset)
#endif
#if HAS_BIAS
PARAM(9, bias_offset)
#endif

READONLY_BUFFER(1, moments, vec2)
#if HAS_WEIGHT
READONLY_BUFFER(2, weight, T_W)
#endif
#if HAS_BIAS
READONLY_BUFFER(2 + HAS_WEIGHT, bias, T_W)
#endif
#define OUT_BINDING (2 + HAS_WEIGHT + HAS_BIAS)
#define EXTRA_BINDING (OUT_BINDING + 1)
#if VEC4
WRITEONLY_BUFFER(OUT_BINDING, out, QUAD_OF(T_OUT))
#define STORE(at, v, row, col) buf_out[(out_offset + (at)) >> 2] = QUAD_FROM(T_OUT, EPILOGUE4(v, row, col));
#else
WRITEONLY_BUFFER(OUT_BINDING, out, T_OUT)
#define STORE(at, v, row, col) buf_out[out_offset + (at)] = ELEMENT_OF(T_OUT, EPILOGUE(v, row, col));
#endif
EXTRA_BUFFERS

shared vec2 means[GROUPS_HERE];  // and what is left of them when they are rounded to a float
shared float rstds[GROUPS_HERE];

float weight_of(int channel) {
#if HAS_WEIGHT
    return FLOAT_OF(T_W, buf_weight[weight_offset + channel]);
#else
    return 1.0;
#endif
}

float bias_of(int channel) {
#if HAS_BIAS
    return FLOAT_OF(T_W, buf_bias[bias_offset + channel]);
#else
    return 0.0;
#endif
}

#if NHWC
// Of the channels of an invocation.
V mean, rest, scale, shift;
#endif

void finish(int i, V v) {
#if NHWC
    STORE(AT(i), (((v - mean) - rest) * scale + shift), (IMAGE * area + i), CHANNEL)
#else
    int own = i * EACH / area, channel = FIRST_GROUP * inner + own;
    V made = ((v - means[0].x) - means[0].y) * (rstds[0] * weight_of(channel)) + bias_of(channel);
    STORE(AT(i), made, (IMAGE * (groups * inner) + channel), (i * EACH - own * area))
#endif
}

LOOPS(loop(ceil(GROUPS_HERE * subgroup_size, LOCAL), 2 * loop(ceil(slices, subgroup_size))))
LOOPS(loop(share / (AHEAD * STRIDE)) + loop(AHEAD))

void main() {
    for (int g = int(gl_SubgroupID); g < GROUPS_HERE; g += int(gl_NumSubgroups)) {
        int at = (IMAGE * groups + FIRST_GROUP + g) * slices;
        float sum = 0.0, deviation = 0.0;
        for (int s = int(gl_SubgroupInvocationID); s < slices; s += int(gl_SubgroupSize)) {
            int size = size_of(s);
            if (size > 0) sum += float(size) * buf_moments[at + s].x;
        }
        float middle = subgroupAdd(sum) / float(COUNT);
        for (int s = int(gl_SubgroupInvocationID); s < slices; s += int(gl_SubgroupSize)) {
            int size = size_of(s);
            if (size == 0) continue;
            vec2 moments = buf_moments[at + s];
            float apart = moments.x - middle;
            deviation += moments.y + float(size) * float(WEIGHT) * apart * apart;
        }
        float variance = subgroupAdd(deviation) / (float(COUNT) * float(WEIGHT));
        if (gl_SubgroupInvocationID == 0u) {
            float pivot = pivot_of((FIRST_GROUP + g) * inner);
            precise float rounded = pivot + middle, left = (pivot - rounded) + middle;
            means[g] = vec2(rounded, left);
            rstds[g] = 1.0 / sqrt(variance + intBitsToFloat(eps_bits));
        }
    }
    barrier();
    int offset = ID / LANES, first = start_of(SLICE), last = first + size_of(SLICE);
    if (offset >= STRIDE) return;
#if NHWC && VEC4
    UNROLL for (int k = 0; k < EACH; k++) {
        int g = (ID % LANES * EACH + k) / inner;
        mean[k] = means[g].x;
        rest[k] = means[g].y;
        scale[k] = rstds[g] * weight_of(CHANNEL + k);
        shift[k] = bias_of(CHANNEL + k);
    }
#elif NHWC
    mean = means[ID % LANES / inner].x;
    rest = means[ID % LANES / inner].y;
    scale = rstds[ID % LANES / inner] * weight_of(CHANNEL);
    shift = bias_of(CHANNEL);
#endif
    int i = first + offset;
    for (; i + (AHEAD - 1) * STRIDE < last; i += AHEAD * STRIDE) {
        V some[AHEAD];
        UNROLL for (int k = 0; k < AHEAD; k++) some[k] = READ(x_offset + AT(i + k * STRIDE));
        UNROLL for (int k = 0; k < AHEAD; k++) finish(i + k * STRIDE, some[k]);
    }
    for (; i < last; i += STRIDE) finish(i, READ(x_offset + AT(i)));
}
