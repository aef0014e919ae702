"""Pure decisions: values in, decisions out."""
