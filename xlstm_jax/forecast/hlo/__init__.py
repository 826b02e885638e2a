"""Parser of the programs that compilers print as text, and analyses of the parsed programs.

program, instruction        the text as objects; trips of loops
device_groups               devices that a collective connects, and the mesh axes of these groups
dataflow, collective_sites  producers and readers of a value; a collective from start to end
text                        integers, lists and dtypes in text
op_names                    module and direction of an operation, from its name
"""
