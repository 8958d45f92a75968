"""What several ops share: tile code, rows of a matrix, scales, products, softmax, programmatic
launch.
"""
