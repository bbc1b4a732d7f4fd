"""The evaluation of a job's SAEs by a process of its own: asked for, carried out, and told."""
