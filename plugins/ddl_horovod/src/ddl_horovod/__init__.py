"""What the packages ``horovod.*`` are made of: Horovod's flags and variables, and their effects in ddl.

This package belongs to the ddlcore of the same version, and uses all of it. Other plugins use only its public part.
"""
