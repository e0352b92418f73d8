#version 450
#extension GL_GOOGLE_include_directive : enable
// One invocation computes one element of the output, or 4 neighbours. lower/pointwise_writer.py writes
// the text of the pointwise program. The defaults add 1 to a float array.
//
// Macros:
//   BUFFERS  declarations of the buffers in0, in1, ..., out0, ...
//   DECLARE  sizes, strides and offsets: SPEC_CONSTANT and PUSH_CONSTANT, from word 1 on
//   BODY     statements; `id` is the number of the invocation
// Parameter `work`: invocations with work.
// Grid: workgroups along x, and along y what x cannot hold.
#include "core/common.glslh"
#pragma purevk macro HAS_8BIT
#ifdef HAS_8BIT
#extension GL_EXT_shader_8bit_storage : require
#extension GL_EXT_shader_explicit_arithmetic_types_int8 : enable
#endif
#pragma purevk macro HAS_16BIT
#ifdef HAS_16BIT
#extension GL_EXT_shader_16bit_storage : require
#extension GL_EXT_shader_explicit_arithmetic_types_int16 : enable
#endif
#ifdef HAS_INT64
#extension GL_EXT_shader_explicit_arithmetic_types_int64 : require
#endif
#include "core/math.glslh"

layout(local_size_x_id = 100) in;
RAW_PUSH_CONSTANT(0, work)

#ifndef BUFFERS
#define BUFFERS READONLY_BUFFER(0, in0, float) WRITEONLY_BUFFER(1, out0, float)
#endif
#ifndef DECLARE
#define DECLARE
#endif
#ifndef BODY
#define BODY buf_out0[id] = buf_in0[id] + 1.0;
#endif

BUFFERS
DECLARE

void main() {
    uint id = INVOCATION_ID.x + INVOCATION_ID.y * gl_NumWorkGroups.x * gl_WorkGroupSize.x;
    if (id < uint(push.p[0])) {
        BODY
    }
}
