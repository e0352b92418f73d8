#version 450
#extension GL_GOOGLE_include_directive : enable
// Adds 1 to `count` vectors of 4, to measure the bandwidth of a device.
// Grid: workgroups along x, and along y what x cannot hold.
#include "core/common.glslh"

layout(local_size_x = 128) in;
RAW_PUSH_CONSTANT(0, count)
READONLY_BUFFER(0, x, vec4)
WRITEONLY_BUFFER(1, out, vec4)

void main() {
    uint i = (gl_WorkGroupID.y * gl_NumWorkGroups.x + gl_WorkGroupID.x) * 128u + gl_LocalInvocationID.x;
    if (i < uint(push.p[0])) buf_out[i] = buf_x[i] + vec4(1.0);
}
