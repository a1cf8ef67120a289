/*
 * The table of what a pickle may do without running code. For each class and function it says how an instance may be
 * made, what state it may be given, and whether it may be a value itself. Everything else is unsupported.
 *
 * A name alone does not make a call harmless: collections.UserDict calls `keys` of its argument, and a pickle can give
 * that name to any function. So each entry has patterns. A pattern is a list of slots, one for each argument:
 *
 *   i  an integer or boolean             k  a number, string, bytes, None, or a tuple of these
 *   f  an integer or floating number     n  None
 *   s  a string                          1  True or 1
 *   x  a string or bytes                 q  a string that names a type of NumPy, such as "f4"
 *   z  a list or tuple of numbers        l  a list or tuple of any values
 *   d  a dict of any values, which has no attributes
 *   e  an empty dict, or None            v  any value; Python only stores it
 *   R  fields: a dict whose keys are strings, none of them like __class__
 *   M  fields in which hooks are empty; for layers and tensors
 *   c  a function that may be a value    g  a class, function or constant that may be a value
 *   y  a torch.dtype                     E  a member of an enumeration
 *   T  a tensor                          P  a storage
 *   D  a numpy.dtype without objects     O  a numpy.dtype of objects
 *   A  a numpy.ndarray                   Z  a timedelta, timezone or ZoneInfo
 *   V  a torch.device                    L  a torch.layout
 *   W  the class torch.Tensor or Parameter          r  a function that rebuilds a tensor
 *   N  the class numpy.ndarray           Q  the class SeedSequence       #  an instance of SeedSequence
 *   (…)  a tuple with these slots        {…}  a dict without attributes whose values fit the slot
 *   […]  one of these slots
 *
 * After a slot, `?` means that it and all later ones may be missing, and `*` that it repeats. `|` separates patterns.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct fc_harmless {
    const char *module, *name;
    const char *reduce; /**< pattern of the arguments of a call; NULL: it may not be called */
    const char *newobj; /**< pattern of the arguments when it is created without its constructor; NULL: it may not */
    const char *state;  /**< pattern of the state, as of one argument; NULL: it has none */
    bool is_value;      /**< whether it may be a value that is not called, such as `int` as a factory */
    bool is_enum;       /**< getattr of it gives a member */
} fc_harmless;

/** @return the number of an entry of the table, or 0 if it has none. */
uint32_t fc_harmless_find(const char *module, size_t module_len, const char *name, size_t name_len);

/** @return entry `number`, which is not 0. */
const fc_harmless *fc_harmless_get(uint32_t number);

/** @return whether a class or function of torch, NumPy or typing that is not in the table may be a value. */
bool fc_harmless_is_reference(const char *module, const char *name);

/** @return whether it is one of the functions that activate a layer, such as "relu", or compute a loss. */
bool fc_harmless_is_activation(const char *name);

/** @return whether it is a layer of torch.nn, such as a loss that was saved with the weights. */
bool fc_harmless_is_layer(const char *module, size_t module_len, const char *name, size_t name_len);
