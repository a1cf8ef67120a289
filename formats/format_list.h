/* The formats, in the order in which they are tried: X(folder), which defines fc_format_<folder>. Included more than
   once, and read by CMake: so there is no guard, and nothing but these lines. */
X(megatron)
X(lightning)
X(accelerate)
X(dcp)
X(hdf5)
X(schema)
X(safetensors)
X(deepspeed)
X(pt)
