"""The backend ``ddl`` of torch.distributed: ``dist.init_process_group("ddl")`` runs torch's collectives on ddl."""
