"""Sharding: conversion of whole tensors to shards and back, across ranks."""
