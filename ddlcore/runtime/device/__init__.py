"""The part of a rank's runtime that handles tensors on devices: queues, events, routes and staging on the host."""
