"""Wire dialects: each turns a request body into wire-normal messages and a reply into response
bytes.
"""
