"""Programs as compilers print them: read from text, and what is asked of them.

program, instruction        the text as objects; how often loops run
device_groups               which devices a collective connects, and along which mesh axes
dataflow, collective_sites  where a value comes from, who reads it; a collective from its start to its end
text                        integers, lists and dtypes in it
op_names                    from the name of an operation to its module and direction
"""
