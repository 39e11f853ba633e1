"""The backend over the native CPU library."""
