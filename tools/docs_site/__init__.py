"""What ``make docs`` adds to the pages of docs/ when MkDocs makes a site of them."""
