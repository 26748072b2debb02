"""A gym server: any registered gym over genv's HTTP protocol."""
