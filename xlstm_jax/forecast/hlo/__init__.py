"""Parser of compiled programs, printed as text, and analyses of the parsed programs.

program, instruction        objects for programs and instructions; trips of loops
device_groups               groups of devices connected by a collective, and the mesh axes of the groups
dataflow, collective_sites  producers and readers of a value; a collective from start to end
text                        integers, lists and dtypes in text
op_names                    module and direction of an operation, from its name
"""
