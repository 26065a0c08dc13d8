// In the place of include/canopy/bulk.cuh, whose copies the emulation has not: what includes it for other things compiles.
#pragma once
#include "canopy/mma.cuh"
