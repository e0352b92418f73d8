#version 450
#extension GL_GOOGLE_include_directive : enable
// `count` multiply-adds in each of 4 chains of vectors, to measure the arithmetic of a device. One need
// not wait for the one before.
#include "core/common.glslh"

layout(local_size_x = 128) in;
RAW_PUSH_CONSTANT(0, count)
BUFFER(0, x, vec4)
LOOPS(loop(count))

void main() {
    vec4 k = buf_x[0], x = vec4(float(gl_GlobalInvocationID.x) * 1e-6);
    vec4 r0 = x, r1 = x + 1.0, r2 = x + 2.0, r3 = x + 3.0;
    for (int i = 0; i < push.p[0]; i++) {
        r0 = r0 * k + x;
        r1 = r1 * k + x;
        r2 = r2 * k + x;
        r3 = r3 * k + x;
    }
    buf_x[1u + gl_GlobalInvocationID.x] = r0 + r1 + r2 + r3;
}
