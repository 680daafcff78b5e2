"""Index files: conversion between an index and the bytes of `.metadata`, `[head][manifest][footer]`."""
