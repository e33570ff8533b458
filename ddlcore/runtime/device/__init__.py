"""The part of a rank's runtime that serves tensors on devices: their queues, events, routes and staging."""
