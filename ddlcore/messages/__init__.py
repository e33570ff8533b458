"""The records of the control network: what ranks send to the coordinator and to the store, and the replies to them.

The records are plain data, which msgspec encodes. If a record cannot be decoded, an error is raised that names the sender.
"""
