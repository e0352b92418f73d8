#version 450
#extension GL_GOOGLE_include_directive : enable
// Shuffles the pixels of int8 images by 2, and requantizes them. An invocation computes 16 neighbours of
// the result, from 8 of each of two channels.
//
// Grid: one invocation for each of the `work` groups of 16.
#include "core/common.glslh"
#include "core/math.glslh"

layout(local_size_x_id = 100) in;
SPEC_CONSTANT(0, height)
SPEC_CONSTANT(1, eights)  // groups of 8 in a row of the input
RAW_PUSH_CONSTANT(0, work)
PUSH_CONSTANT(1, x_zero)  // the bits of floats
PUSH_CONSTANT(2, x_scale)
PUSH_CONSTANT(3, out_inverse)
PUSH_CONSTANT(4, out_zero)
READONLY_BUFFER(0, x, uvec2)
WRITEONLY_BUFFER(1, out, uvec4)

int requantized(int value) {
    float number = pv_dequantize(float(value), intBitsToFloat(x_zero), intBitsToFloat(x_scale));
    return pv_quantize_byte(number, intBitsToFloat(out_inverse), intBitsToFloat(out_zero), -128.0, 127.0);
}

void main() {
    uint id = INVOCATION_ID.x + INVOCATION_ID.y * gl_NumWorkGroups.x * gl_WorkGroupSize.x;
    if (id < uint(push.p[0])) {
        int row = int(id) / eights, h = row / 2 % height, channel = row / 2 / height * 4 + row % 2 * 2;
        int at = (channel * height + h) * eights + int(id) % eights;
        uvec2 even = buf_x[at], odd = buf_x[at + height * eights];
        uvec4 result;
        UNROLL for (int w = 0; w < 2; w++) {
            ivec4 a = pv_signed(even[w]), b = pv_signed(odd[w]);
            // Two elements of each channel become a word of the result.
            result[2 * w + 0] = pv_pack(ivec4(requantized(a.x), requantized(b.x), requantized(a.y), requantized(b.y)));
            result[2 * w + 1] = pv_pack(ivec4(requantized(a.z), requantized(b.z), requantized(a.w), requantized(b.w)));
        }
        buf_out[id] = result;
    }
}
