"""Pictures from descriptions: one creator over every generator of this library."""
