#version 450
#extension GL_GOOGLE_include_directive : enable
// As map.comp, but a workgroup runs the statements together and has shared memory: they may call
// barrier(). Every invocation has work.
//
// BODY    statements, which write the results.
// SHARED  declarations of shared memory.
#include "elementwise/map.glslh"

#ifndef SHARED
#define SHARED shared float kept[1];
#endif
#ifndef BODY
#define BODY kept[0] = 1.0; barrier(); r = X(i0) + kept[0];
#endif

SHARED

void main() {
    uint id = MAP_ID;
    COORDINATES
    BODY
    STORE
}
