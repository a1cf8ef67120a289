/* The formats in the order in which they are probed. X(folder) stands for fc_format_<folder>, defined in that folder.
   This file is included several times and parsed by CMake, so it has no include guard and nothing but these lines. */
X(megatron)
X(lightning)
X(accelerate)
X(dcp)
X(hdf5)
X(schema)
X(nanotron)
X(safetensors)
X(deepspeed)
X(pt)
X(flax)
X(torch_dist)
