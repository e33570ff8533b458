"""One whole job: where its ranks run, what the launcher does while they run, and how it ends."""
