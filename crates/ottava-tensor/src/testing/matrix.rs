//! Products of matrices in F64, for tests that compute recurrences in chunks.

/// A matrix in row-major order.
#[derive(Clone)]
pub(crate) struct Matrix {
    rows: usize,
    columns: usize,
    /// The elements, row by row.
    pub values: Vec<f64>,
}

impl Matrix {
    pub fn of(rows: usize, columns: usize, value: impl Fn(usize, usize) -> f64) -> Matrix {
        let values = (0..rows * columns).map(|at| value(at / columns, at % columns)).collect();
        Matrix { rows, columns, values }
    }

    pub fn at(&self, i: usize, j: usize) -> f64 {
        self.values[i * self.columns + j]
    }

    pub fn t(&self) -> Matrix {
        Matrix::of(self.columns, self.rows, |i, j| self.at(j, i))
    }

    pub fn times(&self, other: &Matrix) -> Matrix {
        assert_eq!(self.columns, other.rows);
        Matrix::of(self.rows, other.columns, |i, j| (0..self.columns).map(|k| self.at(i, k) * other.at(k, j)).sum())
    }

    pub fn plus(&self, other: &Matrix) -> Matrix {
        Matrix::of(self.rows, self.columns, |i, j| self.at(i, j) + other.at(i, j))
    }

    pub fn minus(&self, other: &Matrix) -> Matrix {
        self.plus(&other.scaled(|_| -1.0))
    }

    pub fn by(&self, other: &Matrix) -> Matrix {
        Matrix::of(self.rows, self.columns, |i, j| self.at(i, j) * other.at(i, j))
    }

    /// Multiplies row `i` by `factor(i)`.
    pub fn scaled(&self, factor: impl Fn(usize) -> f64) -> Matrix {
        Matrix::of(self.rows, self.columns, |i, j| factor(i) * self.at(i, j))
    }

    pub fn row_sum(&self, i: usize) -> f64 {
        (0..self.columns).map(|j| self.at(i, j)).sum()
    }

    pub fn column_sum(&self, j: usize) -> f64 {
        (0..self.rows).map(|i| self.at(i, j)).sum()
    }

    pub fn sum(&self) -> f64 {
        self.values.iter().sum()
    }

    /// Keeps the elements below the diagonal, and those on it if `diagonal`.
    pub fn lower(&self, diagonal: bool) -> Matrix {
        let keeps = |i: usize, j: usize| i > j || (diagonal && i == j);
        Matrix::of(self.rows, self.columns, |i, j| if keeps(i, j) { self.at(i, j) } else { 0.0 })
    }

    /// Returns `(1 + self)⁻¹` of a matrix that is zero on and above the diagonal.
    pub fn inverse_of_one_plus(&self) -> Matrix {
        let mut inverse = Matrix::of(self.rows, self.rows, |i, j| f64::from(u8::from(i == j)));
        for i in 0..self.rows {
            for j in 0..i {
                let sum: f64 = (j..i).map(|k| self.at(i, k) * inverse.at(k, j)).sum();
                inverse.values[i * self.rows + j] = -sum;
            }
        }
        inverse
    }
}
